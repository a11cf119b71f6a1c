"""``tests/parallelism/recipes/check.py``: which recipes it takes, how it shrinks them, and what it says of them."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.parallelism.recipes.check import Row, main, row, summary, untrained
from tests.parallelism.recipes.read import CASES, Recipe, parse, read
from tests.parallelism.recipes.sizes import layout, shrink
from tests.parallelism.recipes.trials import Outcome, Stopped, Trial, told, who_waits

PIPELINE = {"--pipeline-model-parallel-size": "2"}
WELL = Outcome(iterations=12, bubble_share=0.25, steps=(3, 9), identical=True)


def recipe(kind: str = "regular", family: str = "gpt", **flags: str | bool) -> Recipe:
    named = {f"--{name.replace('_', '-')}": value for name, value in flags.items()}
    return Recipe("own", family, kind, "pretraining", PIPELINE | named)


def write(checkout: Path, name: str, text: str) -> Path:
    path = checkout / CASES / "gpt" / name / "model_config.yaml"
    path.parent.mkdir(parents=True)
    path.write_text(text)
    return path


def pairs(flags: tuple[str, ...]) -> dict[str, str]:
    """The first value of each flag, itself where it has none."""
    following = zip(flags, (*flags[1:], "--"), strict=True)
    return {flag: value for flag, value in following if flag.startswith("--")}


def test_recipes_with_a_pipeline_are_taken_and_local_ones_come_first(tmp_path):
    write(tmp_path, "alone", "MODEL_ARGS:\n  --pipeline-model-parallel-size: 1\n")
    write(tmp_path, "none", "MODEL_ARGS:\n")
    write(tmp_path, "engine", "MODEL_ARGS:\n  --pipeline-model-parallel-size: 4\n  --bf16: true\n  --fp16: false\n")
    write(tmp_path, "later", "MODEL_ARGS: {--lr: 1}\nMODEL_ARGS_2: {--pipeline-model-parallel-size: 2}\n")
    write(
        tmp_path,
        "local",
        "TEST_TYPE: ckpt-resume\nMODEL_ARGS:\n  --pipeline-model-parallel-size: 2\n  --transformer-impl: local\n"
        '  --recompute-modules: "[mlp moe_act]"\n',
    )
    found = read(tmp_path)
    assert [one.name for one in found] == ["local", "engine", "later"]
    assert (found[0].local, found[0].kind, found[0].mode) == (True, "ckpt-resume", "pretraining")
    assert found[0].flags["--recompute-modules"] == "mlp moe_act"
    assert found[1].flags == {"--pipeline-model-parallel-size": "4", "--bf16": True}


def test_what_is_no_recipe_is_refused(tmp_path):
    with pytest.raises(ValueError, match="expected a checkout of Megatron-LM"):
        read(tmp_path)
    with pytest.raises(ValueError, match=r"model_config\.yaml: .* expected a recipe"):
        parse(write(tmp_path, "list", "MODEL_ARGS: [1]\n"))
    with pytest.raises(ValueError, match=r"model_config\.yaml: "):
        parse(write(tmp_path, "number", "MODEL_ARGS: {--pipeline-model-parallel-size: two}\n"))


def test_sizes_shrink_and_features_stay():
    shrunk = shrink(
        recipe(
            num_layers="48",
            hidden_size="8192",
            num_attention_heads="64",
            num_query_groups="8",
            seq_length="4096",
            micro_batch_size="4",
            global_batch_size="512",
            num_layers_per_virtual_pipeline_stage="8",
            swiglu=True,
            position_embedding_type="rope",
            data_path="${DATA_PATH}/text",
            recompute_modules="mlp moe_act",
        )
    )
    flags = pairs(shrunk.flags)
    assert (shrunk.ranks, shrunk.resumed, shrunk.replaced) == (2, False, ())
    assert (flags["--num-layers"], flags["--num-layers-per-virtual-pipeline-stage"]) == ("4", "1")
    assert (flags["--hidden-size"], flags["--num-attention-heads"], flags["--num-query-groups"]) == ("32", "4", "2")
    assert (flags["--seq-length"], flags["--micro-batch-size"], flags["--global-batch-size"]) == ("32", "1", "4")
    assert flags["--position-embedding-type"] == "rope"
    assert {"--swiglu", "--mock-data"} < set(shrunk.flags)
    assert "--data-path" not in flags
    assert shrunk.flags[shrunk.flags.index("mlp") + 1] == "moe_act"


def test_what_is_not_here_is_replaced_and_said():
    shrunk = shrink(
        recipe(
            kind="frozen-resume",
            transformer_impl="transformer_engine",
            attention_backend="flash",
            distributed_backend="nccl",
            moe_grouped_gemm=True,
            async_save=True,
            use_persistent_ckpt_worker=True,
            ckpt_format="torch_dist",
            save="${CHECKPOINT_SAVE_PATH}",
        )
    )
    flags = pairs(shrunk.flags)
    assert shrunk.resumed
    assert (flags["--transformer-impl"], flags["--attention-backend"]) == ("local", "unfused")
    assert flags["--distributed-backend"] == "gloo"
    assert flags["--save"] == flags["--load"] == "{folder}/checkpoints"
    assert {"--async-save", "--use-persistent-ckpt-worker", "--ckpt-format"} < set(flags)
    assert set(shrunk.replaced) == {
        "--transformer-impl transformer_engine -> local",
        "--attention-backend flash -> unfused",
        "without --moe-grouped-gemm",
        "--async-strategy mcore",
        "from its own first iterations, not NVIDIA's checkpoint",
    }


def test_bert_has_other_flags_for_local_layers():
    shrunk = shrink(recipe(family="bert"))
    flags = pairs(shrunk.flags)
    assert (flags["--spec"], flags["--attention-backend"], "--mock-data" in flags) == ("local", "local", False)
    assert shrunk.replaced == ("--spec local --attention-backend local",)
    assert not shrink(recipe(family="bert", spec="local")).replaced


@pytest.mark.parametrize(
    ("flags", "ranks", "sizes", "changed"),
    [
        ({}, 2, (1, 2, 1, 1), 0),
        ({"use_distributed_optimizer": True}, 4, (1, 2, 1, 1), 0),
        ({"tensor_model_parallel_size": "2", "expert_model_parallel_size": "2"}, 8, (2, 2, 1, 2), 0),
        (
            {
                "tensor_model_parallel_size": "4",
                "expert_model_parallel_size": "2",
                "expert_tensor_parallel_size": "2",
            },
            8,
            (4, 2, 1, 2),
            0,
        ),
        (
            {
                "tensor_model_parallel_size": "8",
                "pipeline_model_parallel_size": "8",
                "expert_model_parallel_size": "64",
            },
            8,
            (2, 2, 1, 2),
            3,
        ),
        ({"tensor_model_parallel_size": "2", "context_parallel_size": "4"}, 8, (2, 2, 2, 1), 1),
    ],
)
def test_parallel_sizes_fit_on_eight_ranks(flags, ranks, sizes, changed):
    found = layout(recipe(**flags).flags)
    assert found.ranks == ranks
    assert (found.tensor, found.pipeline, found.context, found.expert) == sizes
    shrunk = shrink(recipe(**flags))
    assert shrunk.ranks == ranks
    assert len(shrunk.replaced) == changed  # each parallel size that is another than the recipe's is said


def test_batches_by_tokens_and_schedules_by_samples_shrink_together():
    flags = pairs(
        shrink(
            recipe(
                step_batch_size_schedule="0:384 200B:768 400B:1152",
                eval_global_batch_size="1152",
                train_samples="24414062",
                lr_decay_samples="24413696",
                lr_warmup_samples="0",
                moe_layer_freq="([0]*1+[1]*3)",
                num_layers="4",
                num_experts="64",
                moe_router_topk="8",
            )
        ).flags
    )
    assert flags["--step-batch-size-schedule"] == "0:4 512:8 1536:12"
    assert flags["--eval-global-batch-size"] == "4"
    assert (flags["--train-samples"], flags["--lr-decay-samples"], flags["--lr-warmup-samples"]) == (
        "400000",
        "400",
        "0",
    )
    assert (flags["--num-layers"], flags["--moe-layer-freq"]) == ("2", "([0]*1+[1]*1)")
    assert (flags["--num-experts"], flags["--moe-router-topk"]) == ("4", "2")


def own(outcome: Outcome, **changed: Any) -> Row:
    return replace(Row("own", "gpt", "regular", True, 2, False, (), "--bf16", outcome), **changed)


def test_a_row_says_all_in_eighty_columns_and_comes_back_from_the_file():
    rows = [
        own(WELL, resumed=True),
        own(Outcome(refusal="TypeError: " + "no such argument " * 9)),
        own(Outcome(failure="hangs")),
    ]
    for one in rows:
        assert max(map(len, one.told())) <= 80
        assert row("own", json.loads(json.dumps(one.content()))) == one
    assert "identical" in rows[0].told()[1]
    assert "3 steps resumed" in rows[0].told()[1]
    assert "cannot be trained here: TypeError" in rows[1].told()[1]
    assert "FAILED: hangs" in rows[2].told()[1]


def test_only_equal_losses_with_steps_on_every_rank_are_well():
    assert WELL.well
    assert not Outcome(iterations=12, steps=(3, 0), identical=True).well
    assert not Outcome(iterations=12, steps=(3, 9), identical=False).well
    assert not Outcome(refusal="no").well
    assert Outcome(iterations=1, identical=True, exit_code=16).well
    assert not Outcome(iterations=1, identical=True, exit_code=16).stepped
    found = summary([own(WELL), own(WELL, same_as="own"), own(Outcome(refusal="no"), local=False)], 5)
    assert (found["trained"], found["identical_and_stepped"], found["trainings_of_their_own"]) == (2, 2, 1)
    assert (found["local"], found["cannot_be_trained_here"], found["not_yet_tried"]) == (2, 1, 2)


def test_what_does_not_train_is_no_training():
    assert untrained(Recipe("own", "gpt", "frozen-start", "inference", PIPELINE))
    assert not untrained(recipe())


@pytest.mark.parametrize(
    ("with_jobs", "without", "expected"),
    [
        (Stopped("as upstream", 1), Stopped("upstream", 1), Outcome(refusal="upstream")),
        (Stopped("ours", 1), None, Outcome(failure="ours")),
        (Stopped("ours", 1), Stopped("it hangs", None), Outcome(failure="ours")),
        (Stopped("no module", 1), Stopped("it hangs", None, "no module"), Outcome(refusal="no module")),
        (Stopped("it hangs", None), Stopped("it hangs", None), Outcome(failure="with jobs and without: it hangs")),
        (None, Stopped("upstream", 1), Outcome(failure="without PipeFill: upstream")),
        (Stopped("told to", 16), Stopped("told to", 16), Outcome(exit_code=16)),
    ],
)
def test_only_what_fails_without_pipefill_too_is_a_refusal(tmp_path, monkeypatch, with_jobs, without, expected):
    def train(stopped: Stopped | None) -> list[int]:
        if stopped is not None:
            raise stopped
        return [12]

    monkeypatch.setattr(Trial, "_fill", lambda _: train(with_jobs))
    monkeypatch.setattr(Trial, "_train", lambda *_: train(without))
    injected = shrink(recipe(error_injection_type="persistent_error"))
    assert Trial(injected, "gpt", tmp_path, tmp_path, 1).run() == expected
    if expected.exit_code:  # not where the recipe does not ask for an error
        assert Trial(shrink(recipe()), "gpt", tmp_path, tmp_path, 1).run() == Outcome(refusal="told to")


def test_the_first_error_is_told_without_its_echoes():
    output = (
        "[rank1]: RuntimeError: [tcp] Connection closed by peer\n"
        "[rank0]: Traceback (most recent call last):\n"
        '[rank0]:   File "a.py", line 1, in f\n'
        "[rank0]:     assert args.bert, args\n"
        "[rank0]: AssertionError\n"
    )
    assert told(output) == "AssertionError at assert args.bert, args"
    assert told("usage: ...\nx.py: error: unrecognized arguments: --new 1\n") == "unrecognized arguments: --new 1"
    assert told("ended") == "ended"
    mixed = "ValueError  grpo_filter ...... False:\n  File x\nValueError: Only TE supports it\n"
    assert told(mixed) == "ValueError: Only TE supports it"


def test_who_waits_is_the_innermost_line_of_megatron_in_each_rank():
    stack = (
        "Fatal Python error: Aborted\n\nThread 0x2 (most recent call first):\n"
        '  File "/x/megatron/core/a.py", line 1 in b\n'
        "\nCurrent thread 0x1 (most recent call first):\n"
        '  File "/x/torch/distributed.py", line 9 in wait\n'
        '  File "/x/megatron/core/pipeline_parallel/schedules.py", line 7 in recv\n'
    )
    assert who_waits(stack + "more\n" + stack) == "2 ranks in megatron/core/pipeline_parallel/schedules.py:7 recv"
    assert who_waits("") == "no rank says where it waits"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "the following arguments are required: --megatron"),
        (["--megatron", "/proc"], "expected a checkout of Megatron-LM"),
        (["--megatron", "{checkout}", "--recipes", "none"], "--recipes none: no such recipe with a pipeline"),
        (["--megatron", "{checkout}", "--json", "{script}"], "is not of this script"),
    ],
)
def test_wrong_calls(tmp_path, monkeypatch, capsys, arguments, said):
    write(tmp_path, "own", "MODEL_ARGS: {--pipeline-model-parallel-size: 2}\n")
    filled = [argument.format(checkout=tmp_path, script=__file__) for argument in arguments]
    monkeypatch.setattr(sys, "argv", ["check.py", *filled])
    with pytest.raises(SystemExit, match="2"):
        main()
    assert said in capsys.readouterr().err
