"""Documentation matches the code: its programs run, its names exist, and its links resolve."""

import ast
import inspect
import re
import runpy
import subprocess
import sys
import types
import warnings
from importlib import import_module
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import tdkernels
from tdkernels import lang
from tests.ops.attention.flash_decode.oracle import Decode
from tests.support import ranks
from tests.support.programs import environment, run_program

REPO = Path(__file__).parent.parent
README = REPO / "README.md"
TUTORIAL = REPO / "docs" / "contributing" / "primitives.md"
EXPERTS = REPO / "docs" / "guides" / "expert-parallel.md"
LAYERS = REPO / "docs" / "guides" / "moe.md"
DECODING, SEQUENCES = REPO / "docs/guides/flash-decode.md", REPO / "docs/guides/long-sequences.md"
SWAP_IN = REPO / "docs" / "guides" / "swap-in.md"
RACES = REPO / "docs" / "contributing" / "race-checker.md"
EXAMPLE = REPO / "examples" / "first_kernel.py"
DOCUMENTS = sorted([*REPO.glob("*.md"), *(REPO / "docs").rglob("*.md")])


def blocks(document, language):
    """Return the fenced code blocks of a language, without the indentation of a surrounding list."""
    found = re.findall(rf"^( *)```{language}\n(.*?)^ *```$", document.read_text(), re.MULTILINE | re.DOTALL)
    return [re.sub(f"^{indent}", "", block, flags=re.MULTILINE) for indent, block in found]


def run_in_suite(program, tmp_path):
    """Run a program from a file outside the repository; return its output. Its ranks are forked if possible."""
    path = tmp_path / "program.py"
    path.write_text(program)
    code, output, errors = run_program(path, cwd=tmp_path)
    assert code == 0, errors
    return output


def run(program, tmp_path):
    """Run a program from a file outside the repository, as a reader would; return its output."""
    path = tmp_path / "program.py"
    path.write_text(program)
    command = [sys.executable, path]
    done = subprocess.run(command, env=environment(), cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


# ---- docs/contributing/primitives.md ----


def test_primitives_page_quotes_the_example():
    assert blocks(TUTORIAL, "python") == [EXAMPLE.read_text()]


@pytest.mark.slow
def test_primitives_page_shows_the_output_of_its_program(tmp_path):
    (program,) = blocks(TUTORIAL, "python")
    assert run_in_suite(program, tmp_path) == "".join(blocks(TUTORIAL, "text"))


def signature(name):
    """Return the signature of a primitive as the tables of primitives write it."""
    primitive = getattr(lang, name)
    arguments = []
    for parameter in inspect.signature(getattr(primitive, "fn", primitive)).parameters.values():
        default = getattr(parameter.default, "value", parameter.default)  # the value of a constexpr
        stars = "**" if parameter.kind is parameter.VAR_KEYWORD else ""
        value = "" if default is parameter.empty else f"={default!r}".replace("'", '"')
        arguments.append(stars + parameter.name + value)
    return f"{name}({', '.join(arguments)})".replace("_semantic=None", "")


def test_primitives_page_lists_every_primitive_with_its_signature():
    rows = re.findall(r"^\| `(\w+\(.*?\))` \|", TUTORIAL.read_text(), re.MULTILINE)
    assert sorted(rows) == sorted(signature(name) for name in lang.__all__)


# ---- docs/tutorials ----

MAX_LINES = 60, 60, 60, 100
TUTORIALS = dict(zip(("notify_and_wait", "all_gather_push", "low_latency_all_to_all", "ag_gemm"), MAX_LINES))


@pytest.mark.parametrize("name", TUTORIALS)
def test_tutorial_shows_its_program_and_output(name, tmp_path, monkeypatch):
    if ranks.DEVICE != "cuda":  # the race checker runs on CPU ranks
        monkeypatch.setenv("TDKERNELS_SANITIZE", "1")
    page, program = REPO / f"docs/tutorials/{name}.md", (REPO / f"examples/tutorials/{name}.py").read_text()
    assert blocks(page, "python") == [program] and len(program.splitlines()) <= TUTORIALS[name]
    assert run_in_suite(program, tmp_path) == "".join(blocks(page, "text"))


# ---- docs/guides/swap-in.md ----


@pytest.mark.slow
def test_swap_in_page_shows_its_program_output(tmp_path):
    (program,) = (block for block in blocks(SWAP_IN, "python") if "__main__" in block)
    assert run_in_suite(program, tmp_path) == "".join(blocks(SWAP_IN, "text"))


# ---- docs/guides/expert-parallel.md ----


@pytest.mark.slow
def test_expert_parallel_page_shows_the_output_of_its_program(tmp_path):
    (program,) = blocks(EXPERTS, "python")
    assert run_in_suite(program, tmp_path) == "".join(blocks(EXPERTS, "text"))


def test_expert_parallel_page_has_the_computed_sizes():
    k, row_fp8, row_bf16, rate = 8, 7168 + 4 * 56, 2 * 7168, 380e9
    for world_size, tokens in ((4, 128), (4, 4096), (8, 128), (8, 4096)):
        once = tokens * (world_size - 1) * (1 - (1 - 1 / world_size) ** k)
        each = tokens * k * (world_size - 1) / world_size
        sizes = [once * row_fp8, once * row_bf16, once * row_bf16, each * row_bf16]
        cells = [f"{size / 1e6:.2f} MB, {size / rate * 1e6:.1f} µs" for size in sizes]
        assert f"| {world_size} | {tokens} | {once:.0f} | {each:.0f} | {' | '.join(cells)} |" in EXPERTS.read_text()


# ---- docs/contributing/race-checker.md ----


@pytest.mark.slow
@pytest.mark.skipif(ranks.DEVICE == "cuda", reason="the race checker runs on CPU ranks")
def test_race_checker_page_shows_the_output_of_its_program(tmp_path):
    (program,) = blocks(RACES, "python")
    assert run_in_suite(program, tmp_path) == "".join(blocks(RACES, "text"))


def test_racy_kernel_is_the_example_with_two_lines_swapped():
    (program,) = blocks(RACES, "python")
    kernels = [text[text.index("@td.jit") : text.index("def all_sum(")] for text in (program, EXAMPLE.read_text())]
    racy, right = (kernel.splitlines() for kernel in kernels)
    assert sorted(racy) == sorted(right) and sum(a != b for a, b in zip(racy, right, strict=True)) == 2


# ---- docs/guides/moe.md ----


def load_page(source):
    page = types.ModuleType("page")
    exec(compile(source, str(LAYERS), "exec"), vars(page))
    return page


def train_layer(source):
    return load_page(source).train()


def test_moe_page_shows_the_output_of_its_program():
    program, _, _ = blocks(LAYERS, "python")
    assert "print(run_ranks(2, train))" in program
    assert f"{ranks.on_ranks(2, train_layer, program)}\n" == "".join(blocks(LAYERS, "text"))


def run_tp_moe_stages(source):
    x, ids, weights = torch.randn(3, 8), torch.tensor([[0, 1], [1, 2], [1, -1]]), torch.rand(3, 2)
    operands = x, ids, weights, torch.randn(4, 6, 8), torch.randn(4, 8, 3)
    return load_page(source).experts(*(operand.to(ranks.device()) for operand in operands))


def test_moe_page_calls_both_stages_of_tp_moe():
    _, source, _ = blocks(LAYERS, "python")
    assert ranks.on_ranks(2, run_tp_moe_stages, source) == [([12, 3], [2, 6, 2, 0], True)] * 2


def load_model(source, path):
    import transformers

    sizes = dict(hidden_size=16, moe_intermediate_size=8, num_experts=4, num_experts_per_tok=2, num_hidden_layers=1)
    sizes |= dict(num_attention_heads=2, num_key_value_heads=1, head_dim=8, vocab_size=9)
    transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**sizes)).save_pretrained(path)  # only rank 0 writes
    dist.barrier()
    model = load_page(source).load(path, ranks.device())
    logits = model(torch.zeros(1, 2, dtype=torch.int64, device=ranks.device())).logits
    assert logits.shape == (1, 2, 9) and logits.isfinite().all() and logits.dtype == torch.bfloat16
    assert list(model.model.layers[0].mlp.w_down.shape) == [2, 16, 8]


def test_moe_page_loads_a_model(tmp_path):
    pytest.importorskip("transformers", minversion="5.0")
    _, _, source = blocks(LAYERS, "python")
    ranks.on_ranks(2, load_model, source, str(tmp_path))


# ---- docs/guides/flash-decode.md and long-sequences.md ----


def run_function(source, name):
    return getattr(load_page(source), name)()


PROGRAMS = [(DECODING, 0, "decode"), (SEQUENCES, 0, "attend"), (SEQUENCES, 1, "layer")]


@pytest.mark.parametrize("page, number, name", PROGRAMS, ids=lambda part: getattr(part, "stem", part))
def test_attention_pages_show_the_output_of_their_programs(page, number, name):
    programs = [block for block in blocks(page, "python") if "__main__" in block]
    outputs = blocks(page, "text")
    assert len(programs) == len(outputs) and f"print(run_ranks(2, {name}))" in programs[number]
    assert f"{ranks.on_ranks(2, run_function, programs[number], name)}\n" == outputs[number]


def decode_paged_and_latent(paged, latent, fp8):
    case = Decode(2, 4, 2, 16, 9, page=4)
    case.check({"o": load_page(paged).decode_paged(*case.operands(), case.options["block_table"])})
    case = Decode(1, 3, 1, 576, 4, value_dim=512, latent=True, scale=192**-0.5)
    case.check({"o": load_page(latent).decode_latent(case.q, case.k_cache, case.lens)})
    case = Decode(1, 3, 1, 576, 4, value_dim=512, latent=True, scales="tensor", rope=64, scale=192**-0.5)
    scale = case.options["v_scale"] = case.options["k_scale"]
    buffer = torch.cat([cache.view(torch.uint8) for cache in (case.k_cache, case.k_rope)], -1)
    case.check({"o": load_page(fp8).decode_latent_fp8(case.q, buffer, case.lens, scale)})


def test_flash_decode_page_decodes_paged_and_latent_caches():
    functions = [block for block in blocks(DECODING, "python") if "def decode_" in block]
    ranks.on_ranks(2, decode_paged_and_latent, *functions)


# ---- README.md ----


@pytest.mark.parametrize("source", blocks(README, "python"))
def test_readme_names_exist(source):
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                import_module(alias.name)
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                assert hasattr(import_module(node.module), alias.name), ast.unparse(node)
        elif isinstance(node, ast.Attribute) and ast.unparse(node.value) == "tdkernels":
            assert node.attr in tdkernels.__all__
        if isinstance(node, ast.Call) and ast.unparse(node.func).removeprefix("tdkernels.") in tdkernels.__all__:
            function = getattr(tdkernels, node.func.attr)
            inspect.signature(function).bind(*node.args, **{keyword.arg: keyword.value for keyword in node.keywords})


def test_readme_shows_the_output_of_its_program(tmp_path):
    program = blocks(README, "python")[0]
    assert "print(" in program
    assert run(program, tmp_path).strip() == program.splitlines()[-1].partition("  # ")[2]


def forward_and_backward(module, x):
    x = x.clone().requires_grad_()
    y = module(x)
    y.backward(torch.linspace(-1, 1, y.numel(), device=y.device).view_as(y))
    return {"y": y.detach(), "dx": x.grad, "dup": module.up.weight.grad, "ddown": module.down.weight.grad}


def compare_mlps(source):
    """Run the classes of the README's two blocks on the same weights and input, and compare their results."""
    warnings.simplefilter("ignore", FutureWarning)  # torch 2.13 renames collectives of torch 2.11
    mlps = types.ModuleType("mlps")
    exec(compile(source, str(README), "exec"), vars(mlps))
    torch.manual_seed(dist.get_rank())
    plain = mlps.MLP(48, 64, dist.group.WORLD).to(ranks.device())
    overlapped = mlps.OverlappedMLP(48, 64, dist.group.WORLD).to(ranks.device())
    overlapped.load_state_dict(plain.state_dict())
    x = torch.randn(6, 3, 48).to(ranks.device())
    expected = forward_and_backward(plain, x)
    for name, value in forward_and_backward(overlapped, x).items():
        torch.testing.assert_close(value, expected[name], rtol=1e-4, atol=1e-4, msg=lambda m, name=name: f"{name}: {m}")


def test_readme_mlps_are_equivalent():
    sources = [source for source in blocks(README, "python") if re.search(r"^class \w*MLP\(", source, re.MULTILINE)]
    assert len(sources) == 2
    ranks.on_ranks(2, compare_mlps, "\n\n".join(sources))


# ---- docs/images ----


def test_diagrams_are_up_to_date():
    schedules = runpy.run_path(str(REPO / "docs/images/schedules.py"))
    for name, panels in schedules["SCHEDULES"].items():
        assert (REPO / f"docs/images/schedule_{name}.svg").read_text() == schedules["picture"](panels)


# ---- all documents ----


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda d: d.name)
def test_links_resolve(document):
    prose = re.sub(r"^ *```.*?^ *```$", "", document.read_text(), flags=re.MULTILINE | re.DOTALL)
    for link in re.findall(r"\]\(([^)]+)\)", prose):
        if not link.startswith(("https://", "#")):
            assert (document.parent / link.partition("#")[0]).exists(), link


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda d: d.name)
def test_named_files_and_targets_exist(document):
    text = document.read_text()
    for path in re.findall(r"`((?:tdkernels|tests|examples|bench|docs)/[\w./]+)`", text):
        assert (REPO / path).exists(), path
    targets = set(re.findall(r"^([a-z-]+):", (REPO / "Makefile").read_text(), re.MULTILINE))
    for target in re.findall(r"\bmake (?:[A-Z]+=\S* )*([a-z-]+)[`\s]", "\n".join(shell_and_inline_code(text))):
        assert target in targets, target


def shell_and_inline_code(text):
    return re.findall(r"```sh\n.*?```|`[^`\n]+`", text, re.DOTALL)
