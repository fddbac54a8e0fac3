"""`lightning_pgroup.process_group`: a group for a block of a script, which ranks it has, and with whom it shares it."""

import gc
import os
import random
import sys
import threading
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback
from torch.distributed import HashStore
from torch.nn.parallel import DistributedDataParallel

from lightning_pgroup import (
    GroupMismatchError,
    PGroupDDPStrategy,
    PGroupError,
    RanksDisagreeError,
    StoreLostError,
    WorldSizeError,
    destroy_process_group,
    process_group,
)
from lightning_pgroup.membership import Membership
from lightning_pgroup.process_state import process_state
from lightning_pgroup.script_rank import find_place
from tests.blocks import Lines, block, generation, rank_sum
from tests.models import TinyData, TinyModel, make_trainer, whats
from tests.ranks import free_port, open_descriptors, run_ranks
from tests.scripts import TORCHRUN, run
from tests.test_cluster_environments import by_hand, torchrun, variables

LONG = timedelta(minutes=1)
NOWHERE = {"RANK": None, "WORLD_SIZE": None, "MASTER_ADDR": None, "MASTER_PORT": None}

BAD = {
    "a half": ({"rank": 0}, ValueError, "`rank` and `world_size` belong together"),
    "the other half": ({"world_size": 2}, ValueError, "belong together"),
    "a rank too high": ({"rank": 2, "world_size": 2}, ValueError, "from 0 to `world_size` - 1"),
    "a rank below 0": ({"rank": -1, "world_size": 2}, ValueError, "from 0 to"),
    "no rank": ({"rank": "0", "world_size": 2}, TypeError, "`rank` must be a whole number, got '0'"),
    "no size": ({"rank": 0, "world_size": True}, TypeError, "`world_size` must be a whole number"),
    "backend": ({"backend": "smoke"}, ValueError, "`backend='smoke'` names 'smoke'"),
    "timeout": ({"timeout": 0}, ValueError, "`timeout` must be more than 0"),
    "destroy_timeout": ({"destroy_timeout": "soon"}, ValueError, "`destroy_timeout`"),
    "rendezvous_timeout": ({"rendezvous_timeout": -1}, ValueError, "`rendezvous_timeout`"),
    "init_method": ({"init_method": "tcp://here"}, ValueError, "`init_method` must be"),
    "on_error": ({"on_error": "ignore"}, ValueError, "`on_error` must be one of"),
    "on_mismatch": ({"on_mismatch": "ignore"}, ValueError, "`on_mismatch` must be one of"),
    "device": ({"device_id": "abacus"}, ValueError, "`device_id='abacus'` is no device"),
    "a function": ({"backend": len}, TypeError, r"write `@process_group\(\)`"),
    "no device": ({"device_id": 1.5}, TypeError, "`device_id` must be a device"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_arguments_are_refused_before_anything_happens(name):
    arguments, kind, text = BAD[name]
    with pytest.raises(kind, match=text):
        process_group(**arguments)


HALVES = {
    "no size": ({"RANK": 0}, PGroupError, "The environment has RANK=0, which do not say"),
    "no number": ({"RANK": 0, "WORLD_SIZE": "two"}, PGroupError, "RANK=0 and WORLD_SIZE=two"),
    "too high": ({"RANK": 2, "WORLD_SIZE": 2}, PGroupError, "RANK=2 and WORLD_SIZE=2"),
    "no address": ({"RANK": 1, "WORLD_SIZE": 2}, StoreLostError, "Rank 1 of 2 does not know where the ranks meet"),
}


def test_after_a_stage_the_environment_of_ranks_started_by_hand_is_whole():
    """Lightning deletes `WORLD_SIZE` at the end of a stage, and `RANK` alone says nothing."""
    with free_port() as port:

        def job(rank):
            with variables(**by_hand(rank, port, 0)):
                make_trainer(PGroupDDPStrategy()).fit(TinyModel(), datamodule=TinyData())
                with process_group("gloo"):
                    return dist.get_rank(), dist.get_world_size(), rank_sum(rank)

        assert run_ranks(job, bare=True) == [(0, 2, 1.0), (1, 2, 1.0)]


@pytest.mark.parametrize("name", HALVES)
def test_half_of_an_environment_is_an_error_at_once(name):
    values, kind, text = HALVES[name]

    def job(rank):
        with variables(**{**NOWHERE, **values}), pytest.raises(kind, match=text), process_group():
            raise AssertionError("the block was entered")

    run_ranks(job, size=1, bare=True)


def test_an_address_without_a_rank_is_an_error_at_once():
    def job(rank):
        context = process_group(init_method="tcp://127.0.0.1:9")
        with variables(**NOWHERE), pytest.raises(PGroupError, match="not which one this process is"), context:
            raise AssertionError("the block was entered")

    run_ranks(job, size=1, bare=True)


NODES = {
    "loopback": ({"MASTER_ADDR": "127.0.0.1"}, None, 1),
    "localhost": ({"MASTER_ADDR": "localhost"}, None, 1),
    "a name": ({"MASTER_ADDR": "node1"}, None, 2),
    "an address": ({"MASTER_ADDR": "10.1.2.3"}, None, 2),
    "torchrun, one node": ({"MASTER_ADDR": "node1", "GROUP_WORLD_SIZE": 1, "LOCAL_WORLD_SIZE": 2}, None, 1),
    "torchrun, two nodes": ({"MASTER_ADDR": "127.0.0.1", "GROUP_WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 1}, None, 2),
    "ranks on this node": ({"MASTER_ADDR": "node1", "LOCAL_WORLD_SIZE": 2}, None, 1),
    "kubeflow": ({"MASTER_ADDR": "localhost", "KUBERNETES_PORT": "tcp://10.0.0.1:443"}, None, 2),
    "tcp, loopback": ({"MASTER_ADDR": "node1"}, "tcp://[::1]:29500", 1),
    "tcp, a name": ({"MASTER_ADDR": "localhost"}, "tcp://node1:29500", 2),
    "env://": ({"MASTER_ADDR": "localhost"}, "env://", 1),
    "a file": ({"MASTER_ADDR": "localhost"}, "file:///shared/meet", 2),
}


@pytest.mark.parametrize("name", NODES)
def test_only_what_is_known_to_be_one_node_is_taken_for_one(name):
    values, init_method, nodes = NODES[name]
    with variables(RANK=1, WORLD_SIZE=2, MASTER_PORT=29500, **values):
        place = find_place(None, None, init_method, LONG, Membership(), foreign=False)
    assert (place.rank, place.size, place.nodes) == (1, 2, nodes)


def test_a_process_on_its_own_is_a_group_of_one_and_needs_no_network():
    def job(rank):
        before = open_descriptors()
        with variables(**NOWHERE):
            for number in (1, 2):
                with process_group() as group:
                    assert group is dist.group.WORLD
                    assert (dist.get_rank(), dist.get_world_size(), dist.get_backend()) == (0, 1, "gloo")
                    assert generation() == number
                    assert process_state().membership._teams == {}
                del group
                assert not dist.is_initialized()
        process_state().end()
        return open_descriptors() - before

    assert run_ranks(job, size=1, bare=True) == [0]


WAYS = ["by hand", "torchrun", "env://", "tcp", "file"]


@pytest.mark.parametrize("way", WAYS)
def test_the_ranks_of_a_launcher_meet(way, tmp_path):
    with free_port() as port:
        values = {"by hand": by_hand, "torchrun": torchrun, "env://": by_hand}
        methods = {"env://": "env://", "tcp": f"tcp://127.0.0.1:{port}", "file": f"file://{tmp_path}/meet"}

        def job(rank):
            arguments = {"timeout": 20, "init_method": methods.get(way)}
            if way in values:
                environment = values[way](rank, port, 0)
            else:
                environment, arguments = NOWHERE, {**arguments, "rank": rank, "world_size": 2}
            seen = []
            with variables(**environment):
                for _ in range(3):
                    with process_group(**arguments):
                        seen.append((generation(), rank_sum(rank), dist.get_rank(), dist.get_world_size()))
                    assert not dist.is_initialized()
                process_state().end()
            return seen

        assert run_ranks(job, bare=True) == [[(n, 1.0, rank, 2) for n in (1, 2, 3)] for rank in range(2)]


def test_200_blocks_one_after_the_other_with_random_delays():
    def job(rank):
        chance, pause, context = random.Random(rank), threading.Event(), block(rank)
        for number in range(1, 201):
            pause.wait(chance.uniform(0, 0.005))
            with context:
                assert generation() == number
                assert rank_sum(rank) == 1.0
        return open_descriptors()

    run_ranks(job)


def test_without_a_rank_it_is_that_of_the_strategys_run_once_a_stage_has_met_the_others():
    """Before that, rank 0 was alone: it had not even started the others."""

    def job(rank):
        sizes = []
        with variables(RANK=None):
            for fits in (False, True):
                if fits:
                    make_trainer(PGroupDDPStrategy()).fit(TinyModel(), datamodule=TinyData())
                with process_group(timeout=20):
                    sizes.append((dist.get_rank(), dist.get_world_size()))
        return sizes

    assert run_ranks(job) == [[(0, 1), (0, 2)], [(0, 1), (1, 2)]]


def test_a_block_before_the_first_stage_leaves_a_strategys_collectives_local():
    def job(rank):
        strategy = PGroupDDPStrategy(rendezvous_timeout=5)
        make_trainer(strategy)
        with process_group(rank=0, world_size=1):
            pass
        strategy.barrier()
        return strategy.events

    assert run_ranks(job, size=1) == [[]]


def test_blocks_and_trainers_one_after_the_other():
    def job(rank):
        seen = []
        for _ in range(2):
            with block(rank):
                seen.append(("block", generation(), rank_sum(rank)))
            strategy = PGroupDDPStrategy(destroy="on_teardown")
            make_trainer(strategy).fit(TinyModel(), datamodule=TinyData())
            seen += [(event.what, event.generation) for event in strategy.events]
        return seen

    want = [("block", 1, 1.0), ("created", 2), ("destroyed", 2), ("block", 3, 1.0), ("created", 4), ("destroyed", 4)]
    assert run_ranks(job) == [want] * 2


@pytest.mark.parametrize("destroy", ["per_trainer", "at_exit", "never"])
def test_a_group_that_a_strategy_has_kept_ends_where_a_block_begins(destroy):
    def job(rank):
        strategy = PGroupDDPStrategy(destroy=destroy)
        trainer = make_trainer(strategy)
        trainer.fit(TinyModel(), datamodule=TinyData())
        with block(rank):
            number = generation()
        gone = not dist.is_initialized()
        trainer.fit(TinyModel(), datamodule=TinyData())
        why = strategy.events[1].why
        destroy_process_group()
        return number, gone, whats(strategy)[:3], why

    want = [("fit", "created", 1), ("process_group", "destroyed", 1), ("fit", "created", 3)]
    why = "a block begins, which makes a group of its own"
    assert run_ranks(job) == [(2, True, want, why)] * 2


@pytest.mark.parametrize(("on_mismatch", "timeout"), [("reuse", 1800), ("error", 1800), ("reuse", 7), ("error", 7)])
def test_a_block_may_take_over_a_group_that_a_strategy_has_kept(on_mismatch, timeout):
    def job(rank):
        make_trainer(PGroupDDPStrategy(destroy="at_exit")).fit(TinyModel(), datamodule=TinyData())
        context = block(rank, on_mismatch=on_mismatch, timeout=timeout)
        if on_mismatch == "error" and timeout == 7:
            with pytest.raises(GroupMismatchError, match="timeout: 0:30:00 -> 0:00:07"), context:
                raise AssertionError("the block was entered")
            return generation(), dist.is_initialized()
        with Lines() as log, context:
            number = generation()
        assert bool(log.about("process_group asks for another group than the living one")) == (timeout == 7)
        return number, dist.is_initialized()

    # What it has taken over ends with it; what it has refused stays as it is.
    assert run_ranks(job) == [(1, on_mismatch == "error" and timeout == 7)] * 2


def test_a_block_inside_a_block_shares_its_group_and_leaves_it_alone():
    def job(rank):
        context = block(rank)
        with Lines() as log, context as outer:
            with process_group() as inner, context as same:
                assert inner is same is outer
                assert rank_sum(rank) == 1.0
            assert not log.about("asks for another group"), "it has asked for nothing"
            assert rank_sum(rank) == 1.0
            with process_group(timeout=7):
                pass
            assert log.about("asks for another group", "timeout: 0:00:20 -> 0:00:07")
            for arguments, kind, text in (
                ({"rank": 0, "world_size": 1}, WorldSizeError, "asks for 1 ranks inside a stage that runs with 2"),
                ({"rank": 1 - rank, "world_size": 2}, WorldSizeError, f"asks to be rank {1 - rank} inside a stage"),
                ({"timeout": 7, "on_mismatch": "error"}, GroupMismatchError, "timeout: 0:00:20 -> 0:00:07"),
            ):
                with pytest.raises(kind, match=text), process_group(**arguments):
                    raise AssertionError("the block was entered")
            with pytest.raises(ZeroDivisionError), process_group():
                raise ZeroDivisionError
            assert dist.group.WORLD is outer
            assert rank_sum(rank) == 1.0
        assert not dist.is_initialized()
        assert [line.split(" in ")[0] for line in log.about("destroyed")] == [
            f"[rank {rank}/2 gen 1] process group (gloo) destroyed for process_group"
        ]

    run_ranks(job)


@pytest.mark.parametrize("destroy", ["on_teardown", "on_destructor"])
def test_a_block_inside_a_stage_shares_the_group_of_that(destroy):
    def job(rank):
        class Inside(Callback):
            def on_train_batch_end(self, trainer, *args):
                with Lines() as log, process_group() as group:
                    assert group is dist.group.WORLD
                    trainer.total = rank_sum(rank)
                assert not log.about("asks for another group")
                with pytest.raises(WorldSizeError), process_group(rank=0, world_size=1):
                    raise AssertionError("the block was entered")

        strategy = PGroupDDPStrategy(destroy=destroy)
        trainer = make_trainer(strategy, callbacks=[Inside()])
        trainer.fit(TinyModel(), datamodule=TinyData())
        events, total = whats(strategy), trainer.total
        del strategy, trainer
        gc.collect()
        return total, events[0], dist.is_initialized()

    assert run_ranks(job) == [(1.0, ("fit", "created", 1), False)] * 2


def test_a_stage_inside_a_block_shares_the_group_of_the_block():
    def job(rank):
        with block(rank, timeout=1800):
            strategy = PGroupDDPStrategy(destroy="on_teardown")
            make_trainer(strategy).fit(TinyModel(), datamodule=TinyData())
            return whats(strategy), rank_sum(rank)

    assert run_ranks(job) == [([("fit", "reused", 1)], 1.0)] * 2


def test_a_group_of_other_code_is_used_and_left_alive():
    def job(rank):
        hook = sys.excepthook
        dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
        foreign = dist.group.WORLD
        for error in (None, ZeroDivisionError):
            try:
                with variables(**NOWHERE), process_group() as group:
                    assert group is foreign
                    if error is not None:
                        raise error
            except ZeroDivisionError:
                assert error is ZeroDivisionError
            assert dist.group.WORLD is foreign
        with pytest.raises(WorldSizeError, match="in which this process is rank 0 of 1"), block(0):
            raise AssertionError("the block was entered")
        with process_group():
            dist.destroy_process_group()
        sys.excepthook = hook
        del foreign, group
        with variables(**NOWHERE), process_group():
            return generation()

    assert run_ranks(job, size=1) == [1]


def test_a_block_on_one_rank_and_a_stage_on_the_other_is_an_error_on_both():
    def job(rank):
        def enter():
            if rank == 1:
                make_trainer(PGroupDDPStrategy()).fit(TinyModel(), datamodule=TinyData())
            with block(rank, timeout=1800):
                raise AssertionError("the block was entered")

        with pytest.raises(RanksDisagreeError, match="rank 0: 'process_group'; rank 1: 'fit'"):
            enter()
        with block(rank):
            return rank_sum(rank)

    assert run_ranks(job, deadline=20) == [1.0, 1.0]


def test_a_decorated_function_has_a_block_in_each_call():
    def job(rank):
        @block(rank)
        def add(depth):
            """Add."""
            return (generation(), rank_sum(rank), *(add(depth - 1) if depth else ()))

        assert (add.__name__, add.__doc__) == ("add", "Add.")
        return add(0), add(1), dist.is_initialized()

    assert run_ranks(job) == [((1, 1.0), (2, 1.0, 2, 1.0), False)] * 2


def test_what_returns_before_its_body_has_run_can_not_be_decorated():
    def numbers():
        yield 1

    async def wait():
        pass

    async def stream():
        yield 1

    for function in (numbers, wait, stream):
        with pytest.raises(TypeError, match=f"can not decorate '.*{function.__name__}', whose body runs only after"):
            process_group()(function)


def test_a_ddp_wrapper_is_not_the_last_to_let_go_of_the_group():
    def job(rank):
        with block(rank):
            model = DistributedDataParallel(torch.nn.Linear(2, 1))
            model(torch.full((1, 2), rank + 1.0)).sum().backward()
            gradient = model.module.weight.grad[0, 0].item()
        graves = process_state().lifecycle._custody.graveyard._graves
        ((groups, wrappers),) = graves
        assert len(groups) == 1
        assert [wrapper() for wrapper in wrappers] == [model]
        with block(rank):
            again = DistributedDataParallel(model.module)
            again(torch.ones(1, 2)).sum().backward()
        del model, again
        with block(rank):
            return gradient, len(process_state().lifecycle._custody.graveyard._graves)

    assert run_ranks(job) == [(1.5, 0)] * 2


def test_a_child_that_is_forked_inside_has_no_part_in_it():
    def job(rank):
        parent, code = os.getpid(), None
        try:
            with block(rank):
                child = os.fork()
                if child == 0:
                    raise SystemExit(0)  # unwinds the block, in the child
                code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
                total = rank_sum(rank)
        finally:
            if os.getpid() != parent:
                os._exit(7)
        return code, total

    assert run_ranks(job, deadline=20) == [(7, 1.0)] * 2


def test_on_a_thread_of_the_users():
    def job(rank):
        found = []

        def work():
            for _ in range(2):
                with block(rank):
                    found.append((generation(), rank_sum(rank)))

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        with block(rank):
            return [*found, (generation(), rank_sum(rank))]

    assert run_ranks(job) == [[(1, 1.0), (2, 1.0), (3, 1.0)]] * 2


SCRIPT = """
rank = int(os.environ.get("RANK", os.environ.get("LOCAL_RANK", 0)))
def total():
    tensor = torch.ones(1)
    dist.all_reduce(tensor)
    return int(tensor)

for number in range(2):
    with process_group(timeout=30):
        inside = total()
    try:
        with process_group(timeout=30):
            if rank == 1:
                raise ValueError("boom")
            total()
            total()
    except (RuntimeError, ValueError) as error:
        note, = error.__notes__
        assert "on rank 1 (pid" in note and "ValueError: boom" in note, note
    strategy = PGroupDDPStrategy(destroy="on_teardown")
    trainer = make_trainer(strategy)
    trainer.fit(TinyModel(), datamodule=TinyData())
    say(inside, *(f"{e.what}{e.generation}" for e in strategy.events), dist.is_initialized())
"""


@pytest.mark.scripts
def test_blocks_failing_blocks_and_trainers_in_turn_under_torchrun(tmp_path):
    done = run(SCRIPT, tmp_path, launcher=TORCHRUN)
    assert done.code == 0, done.err
    for rank in range(2):
        assert done.said(rank) == [f"2 created{number} destroyed{number} False" for number in (3, 6)]


@pytest.mark.scripts
def test_blocks_and_trainers_in_turn_where_lightning_starts_the_ranks(tmp_path):
    """Rank 0 is alone in a block before the first stage, as nobody has started the others yet; so is each of them."""
    done = run(
        """
        sizes = []
        for number in range(3):
            with process_group(timeout=30):
                sizes.append(dist.get_world_size())
            make_trainer(PGroupDDPStrategy(destroy="on_teardown")).fit(TinyModel(), datamodule=TinyData())
        say(*sizes)
        """,
        tmp_path,
    )
    assert done.code == 0, done.err
    assert done.said() == ["0 1 2 2", "1 1 2 2"]
