"""Ray's workers forked from a process that has imported what they import: 7 s less for an engine, 4 s for a learner.

Ray starts `client` in place of a worker's Python. It asks the session's `manager`, a thread of the process that runs
the tests, for the socket of a `server`, and that server forks the worker, in the namespaces, with the environment and
the files of the client. None of our own modules is imported before the fork, and there is a server for each environment
that libraries read while they are imported.
"""
