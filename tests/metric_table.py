"""Metrics of all kinds with data for them: what each rank gives them, and what a single process would have them say."""

import torch
from torchmetrics import CatMetric, MaxMetric, MeanMetric, Metric, MinMetric, SumMetric
from torchmetrics.classification import (
    BinaryAccuracy,
    BinaryAUROC,
    BinaryAveragePrecision,
    BinaryCalibrationError,
    BinaryPrecisionRecallCurve,
    MulticlassAccuracy,
    MulticlassAUROC,
    MulticlassCohenKappa,
    MulticlassConfusionMatrix,
    MulticlassF1Score,
    MulticlassMatthewsCorrCoef,
    MultilabelF1Score,
)
from torchmetrics.clustering import MutualInfoScore
from torchmetrics.nominal import CramersV
from torchmetrics.regression import (
    CosineSimilarity,
    ExplainedVariance,
    KendallRankCorrCoef,
    MeanAbsoluteError,
    MeanSquaredError,
    PearsonCorrCoef,
    R2Score,
    SpearmanCorrCoef,
)
from torchmetrics.retrieval import RetrievalMAP, RetrievalNormalizedDCG
from torchmetrics.text import CharErrorRate, Perplexity, ROUGEScore

CLASSES = 4


class ColumnSums(Metric):
    """A user's metric whose state has the shape of its data, once there are any."""

    def __init__(self):
        super().__init__()
        self.add_state("total", torch.zeros(()), dist_reduce_fx="sum")

    def update(self, rows, _):
        self.total = self.total + rows.sum(0)

    def compute(self):
        return self.total


def _binary(rows, make):
    return torch.rand(rows, generator=make), torch.randint(2, (rows,), generator=make)


def _classes(rows, make):
    return torch.rand(rows, CLASSES, generator=make).softmax(-1), torch.randint(CLASSES, (rows,), generator=make)


def _labels(rows, make):
    return torch.rand(rows, 3, generator=make), torch.randint(2, (rows, 3), generator=make)


def _pairs(rows, make):
    one = torch.randn(rows, generator=make)
    return one, one + torch.randn(rows, generator=make)


def _vectors(rows, make):
    return torch.randn(rows, 5, generator=make), torch.randn(rows, 5, generator=make)


def _values(rows, make):
    return (torch.randn(rows, generator=make),)


def _categories(rows, make):
    return torch.randint(CLASSES, (rows,), generator=make), torch.randint(CLASSES, (rows,), generator=make)


def _queries(rows, make):
    query = int(torch.randint(1_000_000, (1,), generator=make))
    target = torch.randint(2, (rows,), generator=make)
    target[0] = 1
    return torch.rand(rows, generator=make), target, torch.full((rows,), query)


def _words(rows, make):
    words = ["one", "two", "three", "four"]
    return tuple(
        [" ".join(words[int(torch.randint(4, (1,), generator=make))] for _ in range(3)) for _ in range(rows)] for _ in "ab"
    )


def _tokens(rows, make):
    return torch.randn(1, rows, CLASSES, generator=make), torch.randint(CLASSES, (1, rows), generator=make)


TABLE = {
    "accuracy": (BinaryAccuracy, _binary),
    "auroc": (BinaryAUROC, _binary),
    "average_precision": (BinaryAveragePrecision, _binary),
    "calibration": (BinaryCalibrationError, _binary),
    "curve": (BinaryPrecisionRecallCurve, _binary),
    "class_accuracy": (lambda: MulticlassAccuracy(CLASSES), _classes),
    "class_auroc": (lambda: MulticlassAUROC(CLASSES), _classes),
    "kappa": (lambda: MulticlassCohenKappa(CLASSES), _classes),
    "confusion": (lambda: MulticlassConfusionMatrix(CLASSES), _classes),
    "f1": (lambda: MulticlassF1Score(CLASSES), _classes),
    "matthews": (lambda: MulticlassMatthewsCorrCoef(CLASSES), _classes),
    "label_f1": (lambda: MultilabelF1Score(3), _labels),
    "mutual_info": (MutualInfoScore, _categories),
    "cramers_v": (lambda: CramersV(CLASSES), _categories),
    "cosine": (lambda: CosineSimilarity(reduction="mean"), _vectors),
    "columns": (ColumnSums, _vectors),
    "explained": (ExplainedVariance, _pairs),
    "kendall": (KendallRankCorrCoef, _pairs),
    "mae": (MeanAbsoluteError, _pairs),
    "mse": (MeanSquaredError, _pairs),
    "pearson": (PearsonCorrCoef, _pairs),
    "r2": (R2Score, _pairs),
    "spearman": (SpearmanCorrCoef, _pairs),
    "map": (RetrievalMAP, _queries),
    "ndcg": (RetrievalNormalizedDCG, _queries),
    "characters": (CharErrorRate, _words),
    "rouge": (lambda: ROUGEScore(rouge_keys="rouge1"), _words),
    "perplexity": (Perplexity, _tokens),
    "cat": (CatMetric, _values),
    "max": (MaxMetric, _values),
    "mean": (MeanMetric, _values),
    "min": (MinMetric, _values),
    "sum": (SumMetric, _values),
}


ONE_STATE_PER_ROW = {"rouge"}
"""What torchmetrics itself can not synchronise where ranks have different numbers of rows: gloo aborts the process."""


def build():
    """One metric of each kind, by name."""
    return torch.nn.ModuleDict({name: kind() for name, (kind, _) in TABLE.items()})


def feed(metrics, rank, sizes, seed=0):
    """Update all metrics with batches of some sizes; each rank has data of its own."""
    for number, name in enumerate(metrics):
        make = torch.Generator().manual_seed(1000 * seed + 10 * number + rank)
        for rows in sizes:
            metrics[name].update(*TABLE[name][1](rows, make))


def values(metrics, names=None):
    """What they say, all or some."""
    found = {name: metrics[name].compute() for name in names or metrics}
    return {name: value.sort().values if name == "cat" else value for name, value in found.items()}


def alone(sizes_of, seed=0):
    """What a single process would have them say, with the data of all ranks."""
    metrics = build()
    for rank, sizes in enumerate(sizes_of):
        feed(metrics, rank, sizes, seed)
    return values(metrics)


def differing(found, wanted):
    """The names of those values that are not the wanted ones."""
    return [name for name in found if not _close(found[name], wanted[name])]


def _close(one, other):
    if isinstance(one, dict):
        return all(_close(one[key], other[key]) for key in other)
    if isinstance(one, tuple):
        return all(_close(a, b) for a, b in zip(one, other, strict=True))
    return one.shape == other.shape and torch.allclose(one, other, rtol=1e-4, atol=1e-6)
