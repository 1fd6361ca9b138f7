"""Our classes in the trainers of Hugging Face and Lightning: clipping, accumulation, resuming."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch.utils.data import DataLoader, Dataset
from fusestep.nn import torch as fused
from torch_training import Tagger, assert_close, assert_same_bits, snapshot

pytestmark = pytest.mark.filterwarnings("default")  # the trainers' own
F32 = torch.float32
CLASSES = {
    "AdamW": {"sparse": "touched"}, "LazyAdam": {}, "SGD": {"momentum": 0.9, "sparse": "all"},
    "Adagrad": {},
}  # fmt: skip


class Ids(Dataset):
    """Rows of ids, and what they are worth."""

    def __len__(self) -> int:
        return 48

    def __getitem__(self, k: int) -> dict[str, Any]:
        ids = torch.randint(0, 11, (4,), generator=torch.Generator().manual_seed(k))
        return {"ids": ids, "labels": (ids % 3).float()}


def loss_of(model: Any, ids: Any, labels: Any) -> Any:
    return (model(ids).mean(-1) - labels).pow(2).mean()


def whole_loss(model: Any) -> float:
    items = [Ids()[k] for k in range(48)]
    ids, labels = (torch.stack([item[name] for item in items]) for name in ("ids", "labels"))
    with torch.no_grad():
        return float(loss_of(model, ids, labels))


# Hugging Face


class ForTrainer(Tagger):
    """With the loss that the Trainer asks for."""

    def forward(self, ids: Any, labels: Any = None) -> Any:
        logits = super().forward(ids)
        return {"loss": (logits.mean(-1) - labels).pow(2).mean(), "logits": logits}


def hugging_face(path: Path, name: str, *, dense: bool = False, resume=None, **arguments) -> Any:
    """A finished Trainer."""
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    options = {k: v for k, v in CLASSES[name].items() if k != "sparse" or not dense}
    model = ForTrainer(F32, sparse=not dense)
    given = transformers.TrainingArguments(
        output_dir=str(path), max_steps=12, per_device_train_batch_size=8, use_cpu=True,
        report_to=[], disable_tqdm=True, seed=3, learning_rate=0.05, **arguments)  # fmt: skip

    class WithTables(fused.ClippingTrainer, transformers.Trainer):
        pass

    trainer = WithTables(
        model=model, args=given, train_dataset=Ids(),
        optimizer_cls_and_kwargs=(getattr(fused, name), {"lr": 0.05, **options}))  # fmt: skip
    trainer.train(resume_from_checkpoint=resume)
    return trainer


@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("name", CLASSES)
def test_hugging_face_trains_tables(name: str, steps: int, tmp_path: Path) -> None:
    before = whole_loss(Tagger(F32))
    arguments = {"max_grad_norm": 1.0, "gradient_accumulation_steps": steps}
    trainer = hugging_face(tmp_path, name, save_strategy="no", **arguments)
    inner = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
    assert type(inner) is getattr(fused, name)
    model = Tagger(F32)
    model.load_state_dict(trainer.model.state_dict())
    assert whole_loss(model) < 0.8 * before


def test_hugging_face_clips_tables_as_dense_parameters(tmp_path: Path) -> None:
    arguments = {"max_grad_norm": 0.1, "gradient_accumulation_steps": 2, "save_strategy": "no"}
    trainers = [hugging_face(tmp_path, "SGD", dense=dense, **arguments) for dense in (False, True)]
    assert_close(*(trainer.model.parameters() for trainer in trainers), 1e-5)


@pytest.mark.parametrize("max_norm", [0.0, 0.1])
def test_hugging_face_logs_the_norm_of_tables(max_norm: float, tmp_path: Path) -> None:
    """Which it asks for without clipping too."""
    arguments = {"max_grad_norm": max_norm, "logging_steps": 1, "save_strategy": "no"}
    logs = [
        [entry["grad_norm"] for entry in trainer.state.log_history if "grad_norm" in entry]
        for trainer in (hugging_face(tmp_path, "SGD", dense=d, **arguments) for d in (False, True))
    ]
    assert len(logs[0]) == 12 and min(logs[0]) > 0.0
    assert logs[0] == pytest.approx(logs[1], rel=1e-5)


@pytest.mark.parametrize("name", CLASSES)
def test_hugging_face_resumes(name: str, tmp_path: Path) -> None:
    """From the files of its sixth step: the bits of the training that went on."""
    arguments = {"max_grad_norm": 0.5, "save_strategy": "steps", "save_steps": 6}
    whole = hugging_face(tmp_path / "whole", name, **arguments)
    begun = str(tmp_path / "whole" / "checkpoint-6")
    resumed = hugging_face(tmp_path / "resumed", name, resume=begun, **arguments)
    assert_same_bits(resumed.model.parameters(), whole.model.parameters())


@pytest.mark.parametrize("name", ["AdamW", "SGD"])
def test_hugging_face_clips_dense_gradients(name: str, tmp_path: Path) -> None:
    results = []
    for package in (fused, torch.optim):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(fused, name, getattr(package, name))
            arguments = {"max_grad_norm": 0.1, "gradient_accumulation_steps": 2}
            trainer = hugging_face(tmp_path, name, dense=True, save_strategy="no", **arguments)
        results.append(trainer.model.parameters())
    assert_close(*results, 1e-5)


# Lightning


def lightning_run(path: Path, name: str, package: Any, **arguments: Any) -> Any:
    """The trained module, and its trainer."""
    lightning = pytest.importorskip("lightning")

    class Module(fused.ClippingModule, lightning.LightningModule):
        def __init__(self, *, sparse: bool) -> None:
            super().__init__()
            self.tagger = Tagger(F32, sparse=sparse)

        def training_step(self, batch: Any) -> Any:
            return loss_of(self.tagger, batch["ids"], batch["labels"])

        def configure_optimizers(self) -> Any:
            options = {k: v for k, v in CLASSES[name].items() if k != "sparse" or is_sparse}
            optimizer = getattr(package, name)(self.parameters(), lr=0.05, **options)
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
            return {"optimizer": optimizer, "lr_scheduler": scheduler}

    is_sparse = arguments.pop("sparse")
    resume, epochs = arguments.pop("resume", None), arguments.pop("epochs", 2)
    module = Module(sparse=is_sparse)
    trainer = lightning.Trainer(
        max_epochs=epochs, accelerator="cpu", devices=1, default_root_dir=path, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        **arguments)  # fmt: skip
    trainer.fit(module, DataLoader(Ids(), batch_size=8), ckpt_path=resume)
    return module.tagger, trainer


@pytest.mark.parametrize("batches", [1, 3])
@pytest.mark.parametrize("name", CLASSES)
def test_lightning_trains_tables(name: str, batches: int, tmp_path: Path) -> None:
    model, trainer = lightning_run(
        tmp_path, name, fused, sparse=True, accumulate_grad_batches=batches
    )
    assert type(trainer.optimizers[0]) is getattr(fused, name)
    assert trainer.global_step == 12 // batches
    assert whole_loss(model) < 0.9 * whole_loss(Tagger(F32))


@pytest.mark.parametrize("algorithm", ["norm", "value"])
@pytest.mark.parametrize("name", ["AdamW", "SGD"])
def test_lightning_clips_and_accumulates(name: str, algorithm: str, tmp_path: Path) -> None:
    clipping = {"gradient_clip_val": 0.05, "gradient_clip_algorithm": algorithm}
    results = [
        lightning_run(tmp_path, name, package, sparse=False, accumulate_grad_batches=2, **clipping)
        for package in (fused, torch.optim)
    ]
    assert_close(*(model.parameters() for model, _ in results), 1e-5)


@pytest.mark.parametrize("algorithm", ["norm", "value"])
def test_lightning_clips_tables_as_dense_parameters(algorithm: str, tmp_path: Path) -> None:
    arguments = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.05}
    arguments |= {"gradient_clip_algorithm": algorithm}
    results = [
        lightning_run(tmp_path, "SGD", fused, sparse=sparse, **arguments)
        for sparse in (True, False)
    ]
    assert_close(*(model.parameters() for model, _ in results), 1e-5)


@pytest.mark.parametrize("name", CLASSES)
def test_lightning_resumes(name: str, tmp_path: Path) -> None:
    whole, _ = lightning_run(tmp_path, name, fused, sparse=True, epochs=4)
    _, trainer = lightning_run(tmp_path, name, fused, sparse=True, epochs=2)
    trainer.save_checkpoint(tmp_path / "half.ckpt")
    resumed, _ = lightning_run(
        tmp_path, name, fused, sparse=True, epochs=4, resume=tmp_path / "half.ckpt"
    )
    before = snapshot(Tagger(F32))
    assert_same_bits(resumed.parameters(), whole.parameters())
    assert not torch.equal(before[0], whole.words.weight)


def test_lightning_clips_nothing_that_is_still_scaled() -> None:
    """As without tables: with a scaler, ``fused=True`` unscales in the step."""
    lightning = pytest.importorskip("lightning")

    class Module(fused.ClippingModule, lightning.LightningModule):
        trainer = SimpleNamespace(scaler=torch.amp.GradScaler("cpu"))

    table = torch.nn.Embedding(4, 2, sparse=True)
    table(torch.tensor([1, 1])).sum().backward()
    optimizer, before = fused.SGD(table.parameters(), fused=True), table.weight.grad.clone()
    with pytest.raises(RuntimeError, match=r"^ClippingModule: fused=True leaves unscaling"):
        Module().configure_gradient_clipping(optimizer, 0.5, "norm")
    assert torch.equal(table.weight.grad.to_dense(), before.to_dense())
