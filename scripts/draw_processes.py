"""Draw docs/images/processes.svg: the processes of a run, and the data that travels between them.

`.venv/bin/python scripts/draw_processes.py` writes the file. Text stays legible at 400 pixels, and colours follow the
reader's light or dark mode.
"""

from __future__ import annotations

from html import escape
from pathlib import Path

PICTURE = Path(__file__).resolve().parents[1] / "docs" / "images" / "processes.svg"
_WIDTH, _HEIGHT = 420, 540
_LINE = 17  # pixels from one line of text to the next
_STYLE = """
text { font: 13.5px system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; fill: #1f2430 }
.title { font-weight: 700; font-size: 15px }
.label { fill: #4a5263 }
.card { fill: #ffffff }
.driver { fill: #e3e9fb; stroke: #4a63c8 }
.engine { fill: #dff3ea; stroke: #2b8a63 }
.learner { fill: #fbe9dc; stroke: #c2662a }
.other { fill: #eef0f4; stroke: #7b8496 }
.arrow { stroke: #4a5263; fill: none; stroke-width: 1.6 }
.weights { stroke: #8a3ea8; fill: none; stroke-width: 4 }
.gate { stroke: #4a63c8; fill: none; stroke-width: 1.6; stroke-dasharray: 4 4 }
.head { fill: #4a5263 }
.big { fill: #8a3ea8 }
@media (prefers-color-scheme: dark) {
  text { fill: #e8ebf2 } .label { fill: #b9c1d2 } .card { fill: #1b1f2a }
  .driver { fill: #26315c; stroke: #8ea2f2 } .engine { fill: #173d30; stroke: #5fc79a }
  .learner { fill: #4a2b17; stroke: #eda06c } .other { fill: #2b303d; stroke: #98a2b6 }
  .arrow { stroke: #b9c1d2 } .head { fill: #b9c1d2 } .weights { stroke: #cf8ce8 } .big { fill: #cf8ce8 }
  .gate { stroke: #8ea2f2 }
}
""".strip()


def _text(x: int, y: int, *lines: str, kind: str = "label", anchor: str = "start") -> str:
    return "\n".join(
        f'<text class="{kind}" x="{x}" y="{y + index * _LINE}" text-anchor="{anchor}">{escape(line)}</text>'
        for index, line in enumerate(lines)
    )


def _box(kind: str, place: tuple[int, int, int, int], title: str, *lines: str, is_many: bool = False) -> str:
    """A process: its title and what it holds, centred; several of them as cards behind the first."""
    x, y, width, height = place
    cards = [
        f'<rect class="{kind}" x="{x + shift}" y="{y + shift}" width="{width}" height="{height}" rx="8"/>'
        for shift in ((8, 4, 0) if is_many else (0,))
    ]
    center, top = x + width // 2, y + (height - 19 - _LINE * (len(lines) - 1)) // 2 + 5
    texts = [
        _text(center, top, title, kind="title", anchor="middle"),
        _text(center, top + 19, *lines, kind="", anchor="middle"),
    ]
    return "\n".join([*cards, *texts])


def _arrow(x: int, start: int, end: int, *label: str) -> str:
    """A vertical arrow with its label on the right."""
    tip = 7 if end > start else -7
    return "\n".join(
        [
            f'<path class="arrow" d="M{x} {start}V{end - tip}"/>',
            f'<path class="head" d="M{x - 5} {end - tip}h10l-5 {tip}z"/>',
            _text(x + 8, (start + end) // 2 + 5 - _LINE * (len(label) - 1) // 2, *label),
        ]
    )


def drawing() -> str:
    """The picture as SVG."""
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{_HEIGHT}" '
        f'viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img">',
        "<title>The driver sends prompts to engines and responses to reward workers, and batches to learner ranks; "
        "the learner's weights reach the engines over the refit channel, which the gate checks.</title>",
        f"<style>{_STYLE}</style>",
        f'<rect class="card" width="{_WIDTH}" height="{_HEIGHT}" rx="10"/>',
        _arrow(48, 146, 78, "responses"),
        _arrow(138, 78, 146, "rewards"),
        _arrow(270, 146, 78, "metrics, through", "a spool on disk"),
        _box("other", (12, 14, 186, 64), "reward workers", "can be killed"),
        _box("other", (222, 14, 186, 64), "MLflow", "runs, metrics, artifacts"),
        '<path class="gate" d="M210 236V482"/>',
        _box(
            "driver",
            (12, 146, 396, 90),
            "driver",
            "GRPO loop · scheduler of groups · refit gate",
            "checkpoints · Ray starts and watches the others",
        ),
        _arrow(30, 236, 316, "prompts,", "seeds"),
        _arrow(104, 316, 236, "tokens,", "logprobs,", "counters"),
        _arrow(244, 236, 316, "batch with", "advantages"),
        _arrow(340, 316, 236, "losses"),
        '<path class="weights" d="M320 440V482H100V452"/>',
        '<path class="big" d="M90 456h20l-10 -14z"/>',
        _box(
            "engine",
            (12, 316, 172, 112),
            "engines",
            "vLLM",
            "policy verifies",
            "draft proposes",
            "sampler, checked",
            is_many=True,
        ),
        _box(
            "learner",
            (232, 316, 168, 112),
            "learner ranks",
            "Megatron-Core",
            "policy, optimizer",
            "draft trainer",
            is_many=True,
        ),
        _text(
            210,
            506,
            "refit channel: weights of policy and draft;",
            "the gate compares fingerprints of both sides",
            kind="",
            anchor="middle",
        ),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


if __name__ == "__main__":
    PICTURE.parent.mkdir(parents=True, exist_ok=True)
    PICTURE.write_text(drawing())
