import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from tlp.core.errors import InvalidInputError
from tlp.programs import networks, zoo
from tlp.programs.folding import fold_batch_norm


def norms(module: nn.Module) -> int:
    return sum(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in module.modules())


def randomise(module: nn.Module) -> nn.Module:
    """Statistics that are not those of a fresh BatchNorm, which would fold to nearly nothing."""
    for m in module.modules():
        if isinstance(m, nn.modules.batchnorm._BatchNorm):
            with torch.no_grad():
                for value, low in ((m.running_mean, -1.0), (m.running_var, 0.5), (m.weight, 0.5), (m.bias, -1.0)):
                    assert isinstance(value, torch.Tensor)
                    value.uniform_(low, 1.5)
    return module.eval()


@pytest.mark.parametrize("name", ["resnet_18", "mobilenet_v2", "dcgan"])
def test_every_batch_norm_of_the_zoo_folds(name: str) -> None:
    module, args = zoo.make(name)
    assert norms(module) > 0
    folded = fold_batch_norm(module, args)
    assert norms(folded) == 0
    assert norms(module) > 0, "the argument is not changed"


class Untraceable(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
        self.norm = nn.BatchNorm2d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(int(x.shape[0])):
            x = self.body(x) if float(x.sum()) > -1e9 else x
        return self.norm(x)


class Shared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 1)
        self.first, self.second = nn.BatchNorm2d(3), nn.BatchNorm2d(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.conv(self.first(self.conv(x))))


@pytest.mark.parametrize(
    ("module", "shape", "left"),
    [
        (nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)), (1, 3, 8, 8), 0),
        (nn.Sequential(nn.Conv1d(3, 4, 3), nn.BatchNorm1d(4)), (1, 3, 8), 0),
        (nn.Sequential(nn.ConvTranspose2d(3, 4, 3), nn.BatchNorm2d(4)), (1, 3, 8, 8), 0),
        (nn.Sequential(nn.ConvTranspose2d(4, 4, 3, groups=2), nn.BatchNorm2d(4)), (1, 4, 8, 8), 1),
        (nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)), (2, 3), 0),
        (nn.Sequential(nn.BatchNorm2d(3), nn.Conv2d(3, 4, 3)), (1, 3, 8, 8), 1),
        (nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.BatchNorm2d(4)), (1, 3, 8, 8), 1),
        (Untraceable(), (1, 3, 8, 8), 1),
        (Shared(), (1, 3, 8, 8), 2),
    ],
)
def test_folding_keeps_the_outputs(module: nn.Module, shape: tuple[int, ...], left: int) -> None:
    torch.manual_seed(0)
    module, args = randomise(module), (torch.randn(shape),)
    folded = fold_batch_norm(module, args)
    assert norms(folded) == left
    with torch.no_grad():
        torch.testing.assert_close(folded(*args), module(*args), rtol=1e-4, atol=1e-4)


def test_a_module_without_batch_norm_is_returned_as_it_is() -> None:
    module = nn.Linear(2, 2)
    assert fold_batch_norm(module, (torch.zeros(1, 2),)) is module


def test_factories_are_seeded_and_leave_the_random_state_alone() -> None:
    state = torch.random.get_rng_state()
    first, (a,) = zoo.make("mlp")
    second, (b,) = zoo.make("mlp")
    assert torch.equal(state, torch.random.get_rng_state())
    assert torch.equal(a, b)
    assert all(torch.equal(p, q) for p, q in zip(first.parameters(), second.parameters(), strict=True))
    assert not first.training


def test_names_of_held_out_networks_exist() -> None:
    assert set(zoo.BUILTIN) >= networks.HELD_OUT


def test_importing_is_light() -> None:
    code = (
        "import sys, tlp.programs.networks, tlp.programs.space, tlp.programs.targets;"
        "import tlp.exchange.metaschedule.exporting;"
        "print([m for m in ('torch', 'tvm', 'mlflow') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


def test_bert_tiny() -> None:
    network, workloads = networks.build_network("bert_tiny", "builtin:bert_tiny")
    assert network.holdout
    assert len(network.tasks) == len(workloads) == len({w.workload_id for w in workloads})
    assert {t.workload_id for t in network.tasks} == {w.workload_id for w in workloads}
    names = {t.task: t.weight for t in network.tasks}
    assert list(names) == sorted(names)
    # 4 projections in each of 2 identical layers are one task.
    assert names["fused_matmul_add1"] == 8
    (dense,) = (w for w, t in zip(workloads, network.tasks, strict=True) if t.task == "fused_matmul_add1")
    assert dense.name == "fused_matmul_add"
    assert dense.context["args"] == [
        ["float32", [128, 128]],
        ["float32", [128, 128]],
        ["float32", [128]],
        ["float32", [128, 128]],
    ]
    assert dense.context["flop"] >= 2 * 128**3


NETS = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, first):
        super().__init__()
        # Layers before the convolution shift the names of all variables behind them.
        self.first = nn.Sequential(*(nn.Sequential(nn.Conv2d(8, 8, 1), nn.Tanh()) for _ in range(first)))
        self.body = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())

    def forward(self, x):
        return self.body(self.first(x))

def plain():
    return Net(0), (torch.randn(1, 8, 10, 10),)

def longer():
    return Net(3), [torch.randn(1, 8, 10, 10)]

def wrong():
    return 3

def failing():
    raise RuntimeError("no weights here")
"""


@pytest.fixture
def nets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> str:
    module = f"nets_{abs(hash(request.node.name))}"
    (tmp_path / f"{module}.py").write_text(NETS)
    monkeypatch.chdir(tmp_path)
    return module


def test_the_same_subgraph_in_two_networks_and_processes_is_one_workload(nets: str) -> None:
    plain, first = networks.build_network("plain", f"torch:{nets}:plain")
    longer, second = networks.build_network("longer", f"torch:{nets}:longer", holdout=True)
    assert (plain.holdout, longer.holdout) == (False, True)
    (conv,) = (w for w in first if "conv2d" in w.name)
    assert "add" in conv.name and "relu" in conv.name and len(plain.tasks) == 1
    (twin,) = (w for w in second if w.workload_id == conv.workload_id)
    assert twin.structural_hash == conv.structural_hash
    assert [t.weight for t in longer.tasks if t.workload_id != conv.workload_id] == [3]
    code = (
        "import sys; sys.path.insert(0, '.');"
        "from tlp.programs import networks;"
        f"print(*(w.workload_id for w in networks.build_network('n', 'torch:{nets}:longer')[1]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.split() == [w.workload_id for w in second]


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("builtin:resnet_19", "no builtin network 'resnet_19'; there are bert_base"),
        ("torch:json", "is not torch:MODULE:FACTORY"),
        ("torch:no_such_module:f", "No module named 'no_such_module'"),
        ("torch:json:no_such_function", "no_such_function"),
        ("torch:{nets}:wrong", "not int"),
        ("torch:{nets}:failing", "no weights here"),
        ("keras:x", "is not a network source"),
        ("onnx:missing.onnx", "is not a file"),
    ],
)
def test_refused(nets: str, source: str, message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        networks.build_network("net", source.format(nets=nets))


def test_names_are_checked_first() -> None:
    with pytest.raises(InvalidInputError, match="try 'resnet-18'"):
        networks.build_network("ResNet 18", "builtin:resnet_18")


def test_onnx_without_the_package_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnx", None)
    (tmp_path / "net.onnx").write_bytes(b"x")
    with pytest.raises(InvalidInputError, match="needs the onnx package") as error:
        networks.build_network("net", f"onnx:{tmp_path / 'net.onnx'}")
    assert error.value.next_command == "pip install onnx"
