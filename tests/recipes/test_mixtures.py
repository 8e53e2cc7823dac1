"""Recipes whose default model is a mixture of experts, and one with GPT-OSS. `vlm_classifier`, whose default is one,
has a file of its own."""

from tests.recipes.workshop import GPT_OSS, Workshop


def test_a_mixture_learns_the_form_of_an_answer(random_models: Workshop) -> None:
    """`prompt_distillation.train`, which takes any file with conversations."""
    outcome = random_models.completed(
        *("prompt_distillation.train", "log_path=prompt_distillation", "file_path=HuggingFaceH4/no_robots/train.jsonl"),
        *("batch_size=20", "learning_rate=8e-3", "num_epochs=1"),
    )
    nll = outcome.curve("train_mean_nll")

    assert len(nll) == 32
    assert nll[0] > 5
    assert nll[-1] < 0.5
    assert outcome.checkpoints[-1]["name"] == "final"


def test_a_mixture_is_trained_on_what_it_has_sampled(random_models: Workshop) -> None:
    """`rl_numerics_check`, which asks for a variant of the model.

    Random weights never find an answer; what ends in time, about a quarter, is at least not punished.
    """
    outcome = random_models.completed(
        *("rl_numerics_check.train", "log_path=rl_numerics_check", "groups_per_batch=2", "group_size=16"),
        *("max_tokens=256", "task.page_chars=50", "learning_rate=1e-2", "max_steps=2"),
    )
    gaps, gradients = outcome.curve("optim/kl_sample_train_v1"), outcome.curve("grad_norm")

    assert len(gaps) == 2
    assert gradients[0] > 0
    assert max(map(abs, gaps)) < 1e-4


def test_gpt_oss_learns_in_its_own_format(random_models: Workshop) -> None:
    """`sl_loop` with the renderer that the cookbook chooses for it, which writes Harmony."""
    outcome = random_models.completed(
        *("sl_loop", "log_path=gpt_oss", f"model_name={GPT_OSS}", "batch_size=20", "learning_rate=8e-3"),
        "max_steps=16",
    )
    nll = outcome.curve("train_mean_nll")

    assert "Using renderer: gpt_oss_no_sysprompt" in outcome.output
    assert len(nll) == 16
    assert nll[0] > 5
    assert nll[-1] < 3
