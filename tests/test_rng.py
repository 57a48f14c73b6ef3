import torch

from esper.rng import derive_seed, make_generator, seeded_init


def test_distinct_purposes_random_seeds_and_indices_give_distinct_streams() -> None:
    triples = [
        (purpose, rng_seed, index) for purpose in ("data", "weights") for rng_seed in range(20) for index in range(20)
    ]
    derived = {derive_seed(*triple) for triple in triples}
    assert len(derived) == len(triples)
    assert all(0 <= value < 2**63 for value in derived)
    assert derive_seed("data", 1, 11) != derive_seed("data", 11, 1)


def test_a_derived_random_seed_is_the_same_on_every_machine() -> None:
    assert derive_seed("data", 42, 3) == 5427519391226969908


def test_a_generator_depends_on_purpose_and_random_seed_only() -> None:
    torch.manual_seed(5)
    one = torch.rand(3, generator=make_generator("data", 7))
    torch.rand(9)
    assert torch.equal(one, torch.rand(3, generator=make_generator("data", 7)))
    assert not torch.equal(one, torch.rand(3, generator=make_generator("augmentation", 7)))


def test_seeded_init_does_not_change_the_global_generator() -> None:
    state = torch.get_rng_state()
    with seeded_init(3):
        one = torch.nn.Linear(4, 4)
    assert torch.equal(state, torch.get_rng_state())
    torch.rand(2)
    with seeded_init(3):
        assert torch.equal(one.weight, torch.nn.Linear(4, 4).weight)
