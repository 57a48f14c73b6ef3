import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from esper.config import build_environment
from esper.controllers import RandomController
from esper.data.images import Labelled
from esper.environment import Environment, GrowthStep, StepRecord
from esper.environment.host_run import HostRun, StepPlan
from esper.growth import Mode, SeedSetting
from esper.lifecycle import Blend, Stage, legal
from esper.observation import HostMeasurements
from esper.records import EpisodeLog, LineWriter, make_record, read_lines
from tests.fixtures_environment import environment, text_config
from tests.lifecycle.fixtures_slots import act


def play(env: Environment, seeds: list[int], steps: int = 6) -> list[GrowthStep]:
    """Random legal play; each episode's actions follow from its own seed."""
    controller = RandomController(env.space)
    observation, memory = env.reset(seeds), controller.begin(seeds)
    result = []
    for _ in range(steps):
        action, memory = controller.act(observation, memory)
        result.append(env.step(action))
        observation = result[-1].observation
    return result


def rows(steps: list[GrowthStep], env: int) -> list[list[Tensor]]:
    """Everything measured and seen of one environment."""
    return [
        [
            *(getattr(step.record.now, name)[env] for name in HostMeasurements.__dataclass_fields__),
            step.observation.base[env],
            step.observation.slots[env],
            step.reward[env],
        ]
        for step in steps
    ]


def same(one: list[list[Tensor]], other: list[list[Tensor]]) -> bool:
    pairs = [(a, b) for left, right in zip(one, other, strict=True) for a, b in zip(left, right, strict=True)]
    return all(torch.equal(torch.nan_to_num(a, -7), torch.nan_to_num(b, -7)) for a, b in pairs)


def test_an_episode_is_bit_equal_whatever_its_neighbours_and_threads() -> None:
    alone = rows(play(environment(envs=1), [11]), 0)
    assert same(alone, rows(play(environment(envs=1), [11]), 0))
    assert same(alone, rows(play(environment(envs=3), [5, 11, 7]), 1))
    threaded = environment("environment.threads=2", envs=3)
    assert same(alone, rows(play(threaded, [11, 3, 4]), 0))
    threaded.close()
    assert not same(alone, rows(play(environment(envs=1), [12]), 0))


def test_text_hosts_are_just_as_reproducible_with_dropout() -> None:
    composed = text_config("host.dropout=0.2", "environment.threads=2")
    one = play(build_environment(composed, 2), [1, 2], steps=4)
    other = play(build_environment(composed, 3), [9, 2, 1], steps=4)
    assert same(rows(one, 0), rows(other, 2))
    assert (one[0].record.now.score < 0).all()


def test_thread_counts_and_global_generator_are_left_as_they_were() -> None:
    env = environment("environment.threads=2")
    torch.set_num_threads(2)
    state = torch.get_rng_state()
    play(env, [1, 2], steps=3)
    assert torch.get_num_threads() == 2
    assert torch.equal(state, torch.get_rng_state())
    torch.set_num_threads(1)


def test_hosts_train_even_where_the_caller_has_switched_gradients_off() -> None:
    env = environment()
    plain = rows(play(env, [1, 2], steps=3), 0)
    with torch.inference_mode():
        inside = rows(play(env, [1, 2], steps=3), 0)
    with torch.no_grad():
        without = rows(play(env, [1, 2], steps=3), 0)
    assert same(plain, inside)
    assert same(plain, without)


class Reads(TorchDispatchMode):
    """Counts reads of single values from a tensor, each of which would stop a GPU."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if func is torch.ops.aten._local_scalar_dense.default:
            self.count += 1
        return func(*args, **(kwargs or {}))


SEEDED = {
    "block1": SeedSetting(Mode.BLENDED, 0.5),
    "block2": SeedSetting(Mode.ISOLATED, 1.0),
    "block3": SeedSetting(Mode.FADING, 0.3),
}


def seeded_run(run: HostRun) -> StepPlan:
    """Seeds in every mode, and a plan that trains, measures and probes them."""
    for slot, blueprint, blend in zip(SEEDED, ("conv_light", "norm", "depthwise"), Blend, strict=True):
        run.graft(slot, blueprint, blend)
    return StepPlan(SEEDED, SEEDED, ("block1", "block3"), 2)


def test_training_and_measuring_read_no_value_from_the_device() -> None:
    env = environment()
    env.reset([1, 2])
    plan = seeded_run(env._runs[0])
    with Reads() as reads:
        env._runs[0].epoch(plan, (0.1, 0.2))
    assert reads.count == 0


def test_a_step_reads_no_more_values_with_more_training_and_validation() -> None:
    counts = []
    for batches, batch in ((1, 100), (6, 10)):
        env = environment(f"environment.batches={batches}", f"environment.validation_batch={batch}")
        env.reset([1, 2])
        for _ in range(3):
            seen = legal(env._slots, env.space, env.rules).op[0, 1]
            with Reads() as reads:
                env.step(act(env.space, {"op": "GERMINATE" if seen and not env.view.step else "WAIT"}, {"op": "WAIT"}))
        counts.append(reads.count)  # a step with a blended seed whose contribution is measured
    assert counts[0] == counts[1] <= 20 * env.envs


def test_the_host_epoch_and_the_measurement_run_on_the_meta_device() -> None:
    env = environment()
    data = env.data
    data.splits = {k: Labelled(v.images.to("meta"), v.labels.to("meta")) for k, v in data.splits.items()}
    data._padded, data._mean, data._std = (t.to("meta") for t in (data._padded, data._mean, data._std))
    data.device = torch.device("meta")
    run = HostRun(None, build=lambda: env.host_pool.build(0), optimizer=env._optimizer, data=data, options=env._options)
    packed = run.epoch(seeded_run(run), (0.0, 0.1))
    assert (packed.device.type, packed.shape) == ("meta", (6 + 3 * 4,))


def test_a_text_host_trains_and_is_measured_on_the_meta_device() -> None:
    env = build_environment(
        text_config("optimizer.build.fused=false", "host.dropout=0.1"), 1
    )  # meta has no fused kernel
    data = env.data
    data.splits = {name: tokens.to("meta") for name, tokens in data.splits.items()}
    data.device = torch.device("meta")
    run = HostRun(None, build=lambda: env.host_pool.build(0), optimizer=env._optimizer, data=data, options=env._options)
    run.graft("segment1", "attention", Blend.GATED)
    run.graft("segment2", "mlp_small", Blend.ADD)
    settings = {"segment1": SeedSetting(Mode.BLENDED, 0.5), "segment2": SeedSetting(Mode.ISOLATED, 1.0)}
    packed = run.epoch(StepPlan(settings, settings, ("segment1",), 2), (0.0, 0.1))
    assert packed.device.type == "meta"


def test_half_precision_sees_the_same_health() -> None:
    found = {}
    for precision in ("32", "bf16", "fp16"):
        env = environment(f"environment.precision={precision}", envs=1)
        env.reset([1])
        found[precision] = env.step(act(env.space, GERMINATE)).record.now
    for precision in ("bf16", "fp16"):
        torch.testing.assert_close(found[precision].health, found["32"].health, atol=0.15, rtol=0)
        assert found[precision].loss.item() == pytest.approx(found["32"].loss.item(), rel=0.1)


def scripted(env: Environment, script: dict[int, dict[str, str]], steps: int = 10) -> list[StepRecord]:
    env.reset([3] * env.envs)
    return [env.step(act(env.space, *[script.get(t, {"op": "WAIT"})] * env.envs)).record for t in range(steps)]


GERMINATE = {"op": "GERMINATE", "slot": "block2", "blueprint": "conv_light"}


def test_contribution_is_measured_only_where_a_live_seed_is_blended() -> None:
    records = scripted(environment(envs=1), {0: GERMINATE, 6: {"op": "FOSSILIZE", "slot": "block2"}})
    for record in records:
        during = record.during
        measured = ~record.now.contribution.isnan()
        expected = during.live & (during.alpha > 0)
        assert torch.equal(measured, expected if record.step < 9 else torch.zeros_like(expected))
    assert records[3].now.contribution[0, 1].isfinite()


def test_contribution_is_the_score_with_the_seed_minus_the_score_without() -> None:
    env = environment(envs=1)
    scripted(env, {0: GERMINATE}, steps=4)
    record_settings = {"block2": SeedSetting(Mode.BLENDED, 1.0)}
    step = env.step(act(env.space, {"op": "WAIT"}))
    run = env._runs[0]
    with_seed, without = (100 * run.evaluate(chosen, "validation")[1] for chosen in (record_settings, {}))
    assert step.record.during.alpha[0, 1] == 1
    assert step.record.now.contribution[0, 1].item() == pytest.approx((with_seed - without).item(), abs=1e-4)


def test_attribution_can_be_rare_or_off() -> None:
    for every, expected in ((0, set()), (2, {2, 4})):
        records = scripted(environment(f"environment.attribution_every={every}", envs=1), {0: GERMINATE}, steps=6)
        assert {r.step for r in records if r.now.contribution[0, 1].isfinite()} == expected


def test_what_counts_at_the_end_is_what_was_committed() -> None:
    kept = {0: GERMINATE, 6: {"op": "FOSSILIZE", "slot": "block2"}}
    for script, fossil in ((kept, True), ({0: GERMINATE}, False)):
        env = environment(envs=1)
        records = scripted(env, script)
        last = records[-1]
        seed = last.seed_parameters[0, 1]
        assert seed == 2336
        assert last.earlier.parameters[0] == last.host_parameters[0] + seed
        assert last.now.parameters[0] == last.host_parameters[0] + (seed if fossil else 0)
        committed = {"block2": SeedSetting(Mode.BLENDED, 1.0)} if fossil else {}
        accuracy = env._runs[0].evaluate(committed, "validation")[1]
        assert last.now.accuracy[0] == accuracy
        assert env.test()["accuracy"][0] == env._runs[0].evaluate(committed, "test")[1]
        assert last.terminated.all()
        assert not last.truncated.any()


def test_the_time_limit_may_truncate() -> None:
    records = scripted(environment("environment.time_limit=truncate", envs=1), {})
    assert [bool(record.truncated) for record in records] == [False] * 9 + [True]
    assert not any(record.terminated for record in records)


def test_flops_grow_with_seeds_and_with_probes() -> None:
    plain = scripted(environment(envs=1), {})
    grown = scripted(environment(envs=1), {0: GERMINATE})
    blind = scripted(environment("environment.attribution_every=0", envs=1), {0: GERMINATE})
    spent = [torch.stack([r.now.flops[0] for r in records]).diff() for records in (plain, grown, blind)]
    assert (spent[0] == spent[0][0]).all()
    assert (spent[1][:-1] > spent[0][:-1]).all()
    assert grown[0].now.flops == blind[0].now.flops > plain[0].now.flops  # nothing to probe while it trains
    assert (spent[2][:-1] < spent[1][:-1]).all()


@pytest.mark.parametrize("share", [0.1, 1.0])
def test_a_probe_is_charged_for_the_batches_it_runs(share: float) -> None:
    env = environment(f"environment.attribution_share={share}", envs=1)
    scripted(env, {0: GERMINATE}, steps=4)
    settings = {"block2": SeedSetting(Mode.BLENDED, 1.0)}
    plan, run = StepPlan(settings, settings, ("block2",), 2), env._runs[0]
    before = env._accounting._flops.clone()
    env._accounting.epoch(0, plan)
    with FlopCounterMode(display=False) as counter:
        run.epoch(plan, (0.4, 0.5))
    assert (env._accounting._flops - before).item() == pytest.approx(counter.get_total_flops(), rel=0.12)


def test_a_step_before_reset_or_after_the_end_is_refused() -> None:
    env = environment(envs=1)
    with pytest.raises(RuntimeError, match="call reset first"):
        env.step(act(env.space, {"op": "WAIT"}))
    scripted(env, {})
    with pytest.raises(RuntimeError, match="call reset first"):
        env.step(act(env.space, {"op": "WAIT"}))
    with pytest.raises(ValueError, match=r"seeds: 3 were given for environment\.envs=1"):
        env.reset([1, 2, 3])


def test_episode_records_survive_the_round_trip(tmp_path) -> None:  # type: ignore[no-untyped-def]
    env = environment()
    log = EpisodeLog(env.space, env.rules, [1, 2])
    controller = RandomController(env.space)
    observation, memory = env.reset([1, 2]), controller.begin([1, 2])
    for _ in range(10):
        action, memory = controller.act(observation, memory)
        step = env.step(action)
        log.add(action, step)
        observation = step.observation
    writer = LineWriter(tmp_path / "episodes.jsonl")
    lines = [make_record(env, log, index, arm="random", score=None, parameters=1.0, flops=1.0) for index in range(2)]
    for line in lines:
        writer.write(line)
    writer.close()
    with (tmp_path / "episodes.jsonl").open("a") as file:
        file.write('{"cut off')
    found = list(read_lines(tmp_path / "episodes.jsonl"))
    assert found == lines
    writer = LineWriter(tmp_path / "episodes.jsonl")  # what was cut off gives way
    writer.write(lines[0])
    writer.close()
    assert list(read_lines(tmp_path / "episodes.jsonl")) == [*lines, lines[0]]
    LineWriter(tmp_path / "episodes.jsonl", fresh=True).close()
    assert list(read_lines(tmp_path / "episodes.jsonl")) == []
    assert found[0]["data"] == "synthetic_images"
    assert len(found[0]["steps"]) == 10
    assert found[0]["steps"][0]["contribution"] == [None] * 3
    assert {stage for step in found[0]["steps"] for stage in step["stage"]} <= set(Stage.__members__)
