from hypothesis import given
from hypothesis import strategies as st

from contract.settings import PriorityClass
from gpu_workers.credits import Credits, Need

CLASSES = {
    "online": PriorityClass(rank=0, reserved_slots=8),
    "offline": PriorityClass(rank=1, floor_slots=2),
}


def credits(
    slots: int = 64,
    kv_tokens: int = 10**9,
    long_share: float = 1.0,
    long_share_alone: float = 0.875,
    closed_batches: bool = False,
) -> Credits:
    return Credits(
        CLASSES,
        slots=slots,
        kv_tokens=kv_tokens,
        long_share=long_share,
        long_share_alone=long_share_alone,
        closed_batches=closed_batches,
    )


def fill(one: Credits, class_name: str, *, long: bool = False, kv_tokens: int = 1, shorter_wait: bool = True) -> int:
    need, count = Need(class_name, long, kv_tokens), 0
    while one.admits(need, shorter_wait=shorter_wait):
        one.take(need)
        count += 1
    return count


def test_offline_never_takes_the_slots_reserved_for_online() -> None:
    one = credits()
    assert fill(one, "offline") == 56
    assert fill(one, "online") == 8


def test_as_many_slots_as_are_reserved_stay_free_beside_what_online_holds() -> None:
    one = credits()
    for _ in range(6):
        one.take(Need("online", False, 1))
    assert fill(one, "offline") == 50
    assert fill(one, "online") == 8, "a burst beside the usual load waits for nobody"


def test_class_below_its_floor_may_take_the_reserve() -> None:
    one = credits()
    for _ in range(63):
        one.take(Need("online", False, 1))
    assert fill(one, "offline") == 1
    one.give_back(Need("online", False, 1))
    assert fill(one, "offline") == 1
    one.give_back(Need("online", False, 1))
    assert fill(one, "offline") == 0, "its floor is reached"


def test_online_borrows_all_slots_when_alone() -> None:
    assert fill(credits(), "online") == 64


def test_lent_slots_come_back_one_by_one() -> None:
    one = credits()
    fill(one, "offline")
    fill(one, "online")
    one.give_back(Need("offline", False, 1))
    assert one.admits(Need("online", False, 1), shorter_wait=True)
    one.take(Need("online", False, 1))
    assert not one.admits(Need("offline", False, 1), shorter_wait=True)


def test_class_below_its_floor_goes_first() -> None:
    one = credits()
    assert one.turn(["online", "offline"]) == ["offline", "online"]
    one.take(Need("offline", False, 1))
    one.take(Need("offline", False, 1))
    assert one.turn(["offline", "online"]) == ["online", "offline"]


def test_long_requests_hold_at_most_their_share() -> None:
    one = credits(long_share=0.25)
    assert fill(one, "online", long=True) == 16
    assert fill(one, "online") == 48


def test_long_requests_borrow_what_no_short_one_waits_for_and_give_it_back_one_by_one() -> None:
    one = credits(long_share=0.25, long_share_alone=0.75)
    assert fill(one, "online", long=True, shorter_wait=False) == 48
    assert fill(one, "online") == 16
    one.give_back(Need("online", True, 1))
    assert not one.admits(Need("online", True, 1), shorter_wait=True)
    assert one.admits(Need("online", False, 1), shorter_wait=True)


def test_closed_batch_is_all_of_the_longest_bucket_or_none_of_it() -> None:
    one = credits(slots=12, long_share=0.5, closed_batches=True)
    assert fill(one, "online", long=True) == 6
    assert fill(one, "online") == 0
    for _ in range(6):
        one.give_back(Need("online", True, 1))
    assert fill(one, "online") == 12
    one.give_back(Need("online", False, 1))
    assert not one.admits(Need("online", True, 1), shorter_wait=True)


def test_kv_room_bounds_before_slots_do() -> None:
    assert fill(credits(kv_tokens=1000), "online", kv_tokens=300) == 3


def test_request_larger_than_the_whole_kv_room_runs_alone_instead_of_never() -> None:
    one = credits(kv_tokens=1000)
    assert fill(one, "online", kv_tokens=5000) == 1
    assert not one.admits(Need("online", False, 1), shorter_wait=True)


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["online", "offline"]), st.booleans(), st.integers(1, 400), st.booleans(), st.booleans()
        ),
        max_size=300,
    )
)
def test_no_sequence_of_moves_breaks_a_bound(moves: list[tuple[str, bool, int, bool, bool]]) -> None:
    one = credits(slots=16, kv_tokens=2_000, long_share=0.5)
    inside: list[Need] = []
    for class_name, long, kv_tokens, leave, shorter_wait in moves:
        if leave and inside:
            one.give_back(inside.pop(0))
            continue
        need = Need(class_name, long, kv_tokens)
        if one.admits(need, shorter_wait=shorter_wait):
            one.take(need)
            inside.append(need)
        assert one.used == len(inside) <= 16
        assert sum(n.class_name == "offline" for n in inside) <= 8
        assert sum(n.long for n in inside) <= 14
        assert one.kv_used_tokens == sum(n.kv_tokens for n in inside) <= 2_000
