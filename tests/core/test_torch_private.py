"""Private names of torch: all in one file, and a plain line where this torch lacks one."""

import ast
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.optim import optimizer

from hotlap.core import torch_private
from hotlap.core.errors import MachineError
from hotlap.core.torch_private import LATE, PROBES, Probe, or_none

SRC = Path(torch_private.__file__).parents[1]
ALLOWED = {
    # A method, looked up when it is compared or patched.
    ("script/feed/loader_proxy.py", "DataLoader._get_iterator"),
    ("kit/probe_process.py", "put(DataLoader, '_get_iterator', self._iterated)"),
}


def is_private(name):
    return name.startswith("_") and not name.endswith("__")


def private_names(source):
    """Names of torch with a leading underscore: imported, as attributes of what was imported, or as strings."""
    tree, roots, found = ast.parse(source), set(), []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            module = [node.module] if isinstance(node, ast.ImportFrom) and node.module else []
            for one in node.names:
                path = ".".join([*module, one.name])
                if path.split(".")[0] == "torch":
                    roots.add(one.asname or (one.name if module else "torch"))
                    found += [path] * any(map(is_private, path.split(".")))
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr) and root_of(node) in roots:
            found.append(ast.unparse(node))
        if isinstance(node, ast.Call) and len(node.args) > 1 and root_of(node.args[0]) in roots:
            name = node.args[1]
            found += [ast.unparse(node)] * (isinstance(name, ast.Constant) and is_private(str(name.value)))
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith("torch._"):
            found.append(node.value)
    return found


def root_of(node):
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else None


def again():
    """A copy of the module that looks everything up anew."""
    spec = importlib.util.spec_from_file_location("torch_private_again", torch_private.__file__)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    finally:
        del sys.modules[spec.name]
    return module


def test_only_one_file_uses_private_names_of_torch():
    found = {
        (path.relative_to(SRC).as_posix(), name)
        for path in SRC.rglob("*.py")
        if path != Path(torch_private.__file__)
        for name in private_names(path.read_text())
    }
    assert found == ALLOWED


@pytest.mark.parametrize(
    "line",
    [
        "import torch._dynamo",
        "import torch; torch._foreach_copy_(a, b)",
        "import torch; torch._C.DisableTorchFunction()",
        "from torch import nn; nn.modules.batchnorm._BatchNorm",
        "from torch.nn.modules.batchnorm import _BatchNorm",
        "from torch.utils._pytree import tree_leaves",
        "from torch.nn.utils import parametrize as p; p._cache_enabled",
        "import torch; getattr(torch.autograd.graph, '_engine_run_backward', None)",
        "name = 'torch._dynamo'",
    ],
)
def test_the_rule_sees_each_way_to_a_private_name(line):
    assert private_names(line)


def test_public_names_and_attributes_of_objects_pass_the_rule():
    assert not private_names("import torch\nfrom torch import nn\nnn.Linear(1, 1)\ntensor._version\ntorch.__version__")


@pytest.mark.parametrize("probe", [*PROBES, *LATE.values()], ids=lambda probe: probe.name)
def test_torch_has_every_private_name(probe):
    is_found = or_none(probe.found()) is not None
    if not is_found and (probe.optional or probe.lacks_cuda):
        pytest.skip("hotlap does without" if probe.optional else "this torch is built without CUDA")
    assert is_found


def test_using_a_missing_name_gives_one_plain_line(monkeypatch):
    monkeypatch.delattr(torch._C, "_current_graph_task_id")
    module = again()
    assert [probe.name for probe in module.missing()] == ["torch._C._current_graph_task_id"]
    assert or_none(torch_private.current_graph_task_id) is not None
    with pytest.raises(MachineError) as raised:
        module.current_graph_task_id()
    assert str(raised.value) == (
        f"torch {torch.__version__} has no torch._C._current_graph_task_id, which captured calls need: "
        f"pip install 'torch==2.13.*', or use --plan off"
    )


def test_a_missing_class_can_be_inherited_from_and_gives_the_line_when_it_is_used(monkeypatch):
    monkeypatch.delattr(torch.nn.modules.batchnorm, "_BatchNorm")
    kind = again().BatchNormBase

    class Mine(kind):
        pass

    for use in (Mine, lambda: isinstance(3, (str, kind)), lambda: issubclass(int, kind), lambda: kind.forward):
        with pytest.raises(MachineError, match=r"torch\.nn\.modules\.batchnorm\._BatchNorm"):
            use()


def test_a_missing_table_or_counter_gives_the_line_when_it_is_read(monkeypatch):
    monkeypatch.delattr(optimizer, "_global_optimizer_pre_hooks")
    monkeypatch.delattr(torch.nn.utils.parametrize, "_cache_enabled")
    module = again()
    for use in (bool, len, list):
        with pytest.raises(MachineError, match="_global_optimizer_pre_hooks"):
            use(module.step_pre_hooks_of_all)
    with pytest.raises(MachineError, match="_cache_enabled"):
        module.parametrize_cached()


def test_counters_that_torch_binds_anew_are_read_at_each_call():
    assert torch_private.parametrize_cached() == 0
    with torch.nn.utils.parametrize.cached():
        assert torch_private.parametrize_cached() == 1
    assert torch_private.forward_ad_level() == -1
    with torch.autograd.forward_ad.dual_level():
        assert torch_private.forward_ad_level() == 0


def test_a_module_that_cannot_be_imported_is_named_with_the_reason():
    with pytest.raises(MachineError, match=r"torch\._gone\.name \(No module named 'torch\._gone'\), which tests need"):
        Probe("torch._gone:name", "tests").found()()


def test_what_only_cuda_has_asks_for_a_build_with_cuda(monkeypatch):
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: False)
    with pytest.raises(MachineError, match="has no CUDA, which tests need: install a build with CUDA"):
        Probe("torch._C:_cuda_no_such_name", "tests", cuda=True).found()()
    assert not torch_private.missing([Probe("torch._C:_cuda_no_such_name", "tests", cuda=True)])


def test_hotlap_imports_where_torch_has_none_of_them():
    code = """
import importlib, pkgutil, sys
import torch, hotlap
def found(path):
    raise AttributeError(path)
pkgutil.resolve_name = found
for one in pkgutil.walk_packages(hotlap.__path__, "hotlap."):
    if not one.name.startswith(("hotlap.recipes", "hotlap.__main__")):
        importlib.import_module(one.name)
from hotlap.core.torch_private import missing
assert {"torch._foreach_copy_", "torch.nn.modules.batchnorm._BatchNorm"} <= {probe.name for probe in missing()}
assert "torch._dynamo" not in sys.modules
try:
    hotlap.engine.capture.recording.is_observed()
except hotlap.HotlapError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert f"torch {torch.__version__} has no torch._C._functorch.peek_interpreter_stack, which" in done.stdout
