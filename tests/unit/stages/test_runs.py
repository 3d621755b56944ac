"""What the MLflow run of a task is tagged with."""

from slipstream.recipe import load_recipe
from slipstream.stages.runs import dtype_tags


def test_a_task_is_tagged_with_the_type_it_computes_in_and_one_that_computes_nothing_with_none() -> None:
    recipe = load_recipe("tiny", overrides={"learner": {"dtype": "float32"}, "engine": {"dtype": "bfloat16"}})
    assert dtype_tags(recipe) == {"dtype.learner": "float32", "dtype.engine": "bfloat16"}
    assert dtype_tags(load_recipe("tiny")) == {}
