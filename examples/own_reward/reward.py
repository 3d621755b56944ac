"""A reward of one's own: the right answer counts, and a short way to it counts a little more."""


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """Score one response. verl calls the same function; what stands beside `score` becomes a metric of the step."""
    _, box, rest = solution_str.rpartition("\\boxed{")
    is_right = bool(box) and rest.partition("}")[0].strip() == ground_truth and extra_info["finish_reason"] == "stop"
    return {"score": (1.0 if len(solution_str) <= 40 else 0.9) if is_right else 0.0, "right": float(is_right)}
