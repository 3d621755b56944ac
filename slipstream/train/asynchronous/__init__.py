"""Generation and training at the same time: three small loops, each in a thread of its own.

- produce: owns the engines. It generates, and gives them new weights when the trainer asks for that.
- score: rewards what was generated.
- train: learns from it, and asks for the next weights to be published. It alone is finite.

They meet in `meeting.py`, and what is scored waits in one bounded buffer of groups (`buffer.py`). How far generation
runs ahead is a bound on the lag and nothing else.
"""
