"""Each policy through one and the same life on real ranks: when the group is there, and which generation."""

import gc

import pytest
import torch.distributed as dist

from lightning_pgroup import PGroupDDPStrategy
from lightning_pgroup.process_state import process_state
from tests.models import TinyData, TinyModel, make_trainer
from tests.ranks import run_ranks
from tests.test_stage_boundaries import Raises

# The living generation after: fit, test of the same Trainer, fit of another, its failure, fit of a third, the collection of all
# strategies, the end of the process. None: there is no group.
LIVES = {
    "on_teardown": [None, None, None, None, None, None, None],
    "per_trainer": [1, 1, 2, None, 3, 3, None],
    "on_destructor": [1, 1, 1, None, 2, None, None],
    "on_error": [1, 1, 1, None, 2, 2, None],
    "at_exit": [1, 1, 1, None, 2, 2, None],
    "never": [1, 1, 1, 1, 1, 1, 1],
    ("on_teardown", "on_error"): [None, None, None, None, None, None, None],
    ("per_trainer", "on_destructor"): [1, 1, 2, None, 3, None, None],
    ("on_error", "at_exit"): [1, 1, 1, None, 2, 2, None],
}


@pytest.mark.parametrize("destroy", LIVES, ids=str)
def test_life_of_the_group(destroy):
    def job(rank):
        names = [destroy] if isinstance(destroy, str) else list(destroy)
        life = []

        def note():
            generation = process_state().lifecycle.generation
            assert dist.is_initialized() == (generation is not None)
            life.append(generation)

        def build(**kwargs):
            return make_trainer(PGroupDDPStrategy(destroy=names), **kwargs)

        first = build()
        first.fit(TinyModel(), datamodule=TinyData())
        note()
        first.test(TinyModel(), datamodule=TinyData(), verbose=False)
        note()
        build().fit(TinyModel(), datamodule=TinyData())
        note()
        try:
            build(callbacks=[Raises("on_fit_end", ValueError("boom"))]).fit(TinyModel(), datamodule=TinyData())
        except ValueError:
            note()
        build().fit(TinyModel(), datamodule=TinyData())
        note()
        del first
        gc.collect()
        note()
        process_state().end()
        note()
        if dist.is_initialized():
            dist.destroy_process_group()
            process_state().lifecycle._custody.notice_loss()
        return life

    # A failing Trainer of "per_trainer" has its own generation, which the failure ends.
    want = list(LIVES[destroy])
    if "per_trainer" in destroy:
        want[4] += 1
        want[5] = want[4] if want[5] else None
    assert run_ranks(job) == [want] * 2
