"""A reward for programs: the share of a problem's cases that the answer's function gets right.

A reference is JSON: `{"function": "add", "cases": [[[1, 2], 3], ...]}`, the arguments and the value of each case. The
answer is hostile code until shown otherwise. It runs in a process of its own, without network, with limits of time and
memory. It may write no file and start no process, though it can read what this user can. It is told the arguments
alone: the values are compared here, so that no program can pass by ending early, by printing "passed" or by changing
what "equal" means.
"""

import json
import re
import subprocess
import sys

CPU_SECONDS, MEMORY_BYTES, WALL_SECONDS = 2, 512 * 2**20, 4  # `reward.timeout_s` must be longer than the last
_SANDBOX = ["unshare", "--user", "--map-root-user", "--net", "--pid", "--fork", "--kill-child"]  # of util-linux
_LIMITS = ["prlimit", f"--cpu={CPU_SECONDS}", f"--as={MEMORY_BYTES}", "--fsize=0", "--core=0", "--nofile=64"]
_RUN = """
import json, os, sys
source, name, calls = json.load(sys.stdin)
replies = os.dup(1)
os.dup2(os.open(os.devnull, os.O_WRONLY), 1)

def refuse(event, given):
    writes = event == "open" and given[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC)
    does = event.startswith(("os.", "socket.", "subprocess.", "ctypes.")) and event not in ("os.listdir", "os.scandir")
    if writes or does or event == "import" and given[0] in ("_ctypes", "_posixsubprocess"):
        os._exit(1)  # the limits of processes and of rights do not bind root

sys.addaudithook(refuse)
scope = {"__name__": "answer"}
exec(compile(source, "answer", "exec"), scope)
for arguments in calls:
    try:
        line = json.dumps(scope[name](*arguments))
    except Exception:
        line = "!"  # no JSON: equal to no value
    os.write(replies, line.encode()[:4000] + b"\\n")
"""


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """Score one response. verl calls the same function; what stands beside `score` becomes a metric of the step."""
    task = json.loads(ground_truth)
    blocks = re.findall(r"```(?:python|py)?\n(.*?)```", solution_str, re.DOTALL)
    if not blocks:
        return {"score": 0.0, "has_code": 0.0}
    values = _values(blocks[-1], task["function"], [arguments for arguments, _ in task["cases"]])
    right = [value == json.dumps(wanted) for value, (_, wanted) in zip(values, task["cases"], strict=False)]
    return {"score": sum(right) / len(task["cases"]), "has_code": 1.0}


def _values(source, name, calls):
    """Run the answer; return the values of its calls as JSON, as many as it came to."""
    given = json.dumps([source, name, calls])
    command = [*_SANDBOX, *_LIMITS, sys.executable, "-I", "-S", "-c", _RUN]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        try:
            output, _ = process.communicate(given.encode(), timeout=WALL_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()  # and with it all processes of its namespace
            return []
    return output.decode(errors="replace").splitlines()


def _refuse_without_sandbox():
    """End the worker where the sandbox does not work: every answer would score 0 there."""
    if _values("def one(): return 1", "one", [[]]) != ["1"]:
        raise RuntimeError(f"`{' '.join(_SANDBOX)}` does not work here; the system must allow user namespaces")


_refuse_without_sandbox()
