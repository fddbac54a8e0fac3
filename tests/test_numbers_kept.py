"""States of communication hooks, averagers and optimizers go on with their numbers in the next group."""

from collections import OrderedDict

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.algorithms.model_averaging.hierarchical_model_averager import HierarchicalModelAverager
from torch.distributed.optim import ZeroRedundancyOptimizer

from lightning_pgroup import PGroupDDPStrategy
from tests.faults import same
from tests.models import TinyData, make_trainer
from tests.ranks import run_ranks

GROUPS = {"pairs": [[0, 1], [2, 3]]}
BATCHES = 4


class WideModel(LightningModule):
    """Has matrices that PowerSGD compresses."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.layers = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.Linear(16, 16))

    def training_step(self, batch, batch_idx):
        return (self.layers(batch[0]) - 1).pow(2).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05)


class WithPowerSGD(WideModel):
    state = None

    def on_train_start(self):
        if self.state is None:
            self.state = PowerSGDState(dist.group.WORLD, start_powerSGD_iter=2, min_compression_rate=1)
        self.trainer.strategy.model.register_comm_hook(self.state, powerSGD_hook)  # Lightning does so on GPUs only

    def numbers(self):
        sizes = {index: error.norm().item() for index, error in self.state.error_dict.items()}
        return self.state.iter, sizes, self.state.total_numel_after_compression


class WithPostLocalSGD(WideModel):
    state = None

    def on_train_start(self):
        if self.state is None:
            pairs = self.trainer.strategy.group("pairs")
            self.state = PostLocalSGDState(dist.group.WORLD, pairs, start_localSGD_iter=3)
            self.averager = PeriodicModelAverager(period=4, warmup_steps=3)
        self.trainer.strategy.model.register_comm_hook(self.state, post_localSGD_hook)

    def on_train_batch_end(self, *_):
        self.averager.average_parameters(self.parameters())

    def numbers(self):
        return self.state.iter, self.averager.step


class WithHierarchy(WideModel):
    averager = None

    def on_train_batch_end(self, *_):
        if self.averager is None:
            self.averager = HierarchicalModelAverager(OrderedDict([(2, 2), (4, 4)]), warmup_steps=1)
        self.averager.average_parameters(self.parameters())

    def numbers(self):
        return self.averager.step, {period: one.size() for period, one in self.averager.period_process_group_dict.items()}


class WithShards(WideModel):
    sharded = None

    def configure_optimizers(self):
        if self.sharded is None:
            self.sharded = ZeroRedundancyOptimizer(self.parameters(), torch.optim.Adam, lr=0.05)
        return self.sharded

    def numbers(self):
        return [state["step"].item() for state in self.sharded.optim.state.values()], self.sharded.global_rank


KINDS = (WithPowerSGD, WithPostLocalSGD, WithHierarchy, WithShards)


def train(kind, destroy):
    """Fit three times, with as many generations or with one."""
    model = kind()
    strategy = PGroupDDPStrategy(destroy=destroy, groups=GROUPS)
    generations = []
    for _ in range(3):
        trainer = make_trainer(strategy, devices=4, limit_train_batches=BATCHES)
        trainer.fit(model, datamodule=TinyData(rows=16 * BATCHES))
        generations.append(strategy.events[-1].generation)
    strategy.close()
    return [one.detach().clone() for one in model.parameters()], model.numbers(), generations


def test_three_generations_train_what_one_trains():
    def job(rank):
        return {kind: [train(kind, destroy) for destroy in ("on_teardown", "at_exit")] for kind in KINDS}

    for rank, done in enumerate(run_ranks(job, 4)):
        for number, kind in enumerate(KINDS):
            (weights, numbers, generations), (weights_of_one, numbers_of_one, _) = done[kind]
            assert generations == [4 * number + n for n in (1, 2, 3)], kind
            assert numbers == numbers_of_one, kind
            assert same(weights, weights_of_one), kind
        assert done[WithPowerSGD][0][1][0] == 3 * BATCHES
        assert any(done[WithPowerSGD][0][1][1].values())
        assert done[WithPostLocalSGD][0][1] == (3, 3 * BATCHES)
        assert done[WithHierarchy][0][1] == (3 * BATCHES, {2: 2, 4: 4})
        assert done[WithShards][0][1] == ([3.0 * BATCHES], rank)
