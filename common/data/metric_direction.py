"""Whether lower or higher values of a metric are better, by its name.

The names are those of the field, in two lists; letter case does not matter, and words that only
qualify a metric are passed over ("top5_accuracy", "recall@10", "error_rate", "f1_macro"). What is
in neither list has no known direction: a guess would keep the worst model of a run as its best.
"""

from __future__ import annotations

import re
from typing import Literal

Direction = Literal["min", "max"]


def words_of(text: str) -> frozenset[str]:
    """Return the words of a list that is written as text."""
    return frozenset(text.split())


LOWER = words_of("""
    loss losses error errors err mistakes wrong cost perplexity ppl mae mse rmse msle rmsle
    mape smape wape mase nmse nrmse medae mad wer cer ter der eer fid kid nll bits bpc bpb
    bpp bpd nats ece mce brier crps ce bce crossentropy xent kl kld divergence regret distance
    rmsd emd hausdorff lpips epe mpjpe fpr fnr far frr pinball hinge hamming
""")
HIGHER = words_of("""
    accuracy acc accuracies right correct hits f1 f2 fbeta precision recall sensitivity
    specificity auc auroc auprc aupr roc ap map ndcg mrr dice iou miou jaccard bleu rouge
    meteor chrf cider psnr ssim r2 correlation pearson spearman kendall kappa mcc likelihood
    concordance cindex purity nmi ari elbo reward rewards match tpr tnr npv ppv gini
""")
PARTS = words_of("""
    accuracy acc accuracies right correct hits f1 f2 fbeta precision recall sensitivity
    specificity auc auroc auprc iou miou jaccard dice purity tpr tnr npv ppv
""")
# Two words whose meaning is not that of the last one.
PHRASES: dict[tuple[str, ...], Direction] = {
    ("negative", "log", "likelihood"): "min",
    ("neg", "log", "likelihood"): "min",
    ("cross", "entropy"): "min",
    ("log", "loss"): "min",
    ("explained", "variance"): "max",
    ("average", "precision"): "max",
}
# Numbers, and words that say of which examples or how a metric is taken.
QUALIFIER = re.compile(
    r"\d+|top\d*|at|k|rate|score|scores|mean|avg|average|total|sum|macro|micro|weighted|binary|"
    r"ratio|percent|value|per|token|tokens|example|examples|sample|word|words|class|test|train|val|"
    r"valid|validation|held|out|eval"
)
TURNED = words_of("""
    neg negative inverse inverted minus delta difference diff reduction improvement gain gap
    false one
""")


def _words_in(name: str) -> list[str]:
    split = re.sub(r"([a-z])([A-Z])", r"\1 \2", name)
    return [word for word in re.split(r"[^a-z0-9]+", split.lower()) if word]


def is_part(name: str) -> bool:
    """Return whether a metric is a part of the examples, by its name: at most 1."""
    return not PARTS.isdisjoint(_words_in(name)) and direction_of(name) == "max"


def direction_of(name: str) -> Direction | None:
    """Return which values of a metric are better; None if its name does not tell.

    ================================  ======================================================
    name                              direction
    ================================  ======================================================
    ``test_loss``, ``WER``, ``MAE``   min
    ``top5_accuracy``, ``auc``, R2    max
    ``score``, ``height``             None: in neither list
    ``neg_mse``, ``error_reduction``  None: a word that may turn the meaning round
    ================================  ======================================================
    """
    words = _words_in(name)
    for phrase, direction in PHRASES.items():
        if tuple(words[-len(phrase) :]) == phrase:
            rest = words[: -len(phrase)]
            return None if TURNED & set(rest) else direction
    own = [word for word in words if word in LOWER | HIGHER or not QUALIFIER.fullmatch(word)]
    if not own or TURNED & set(own):
        return None
    return "min" if own[-1] in LOWER else "max" if own[-1] in HIGHER else None
