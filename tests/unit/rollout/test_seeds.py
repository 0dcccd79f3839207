from __future__ import annotations

from argusrl.rollout.seeds import derive_seed


def test_seeds_are_a_function_of_the_names_alone():
    assert derive_seed(0, 1, "row 7", 3) == 8008091618823395972  # on every machine, in every version


def test_every_name_and_its_place_counts():
    names = [
        (0, 1, "p", 2),
        (1, 1, "p", 2),
        (0, 2, "p", 2),
        (0, 1, "q", 2),
        (0, 1, "p", 3),
        (1, 0, "p", 2),
        (0, 1, "p2"),
    ]
    assert len({derive_seed(*each) for each in names}) == len(names)


def test_seeds_fit_into_a_signed_integer_of_64_bits():
    assert all(0 <= derive_seed("row", number) < 2**63 for number in range(1000))
