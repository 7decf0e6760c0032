"""Recipes for generated GPU traces: training steps on one or more ranks, and engine iterations."""

from __future__ import annotations

from pathlib import Path

from benchmarks.diagnosis.gpu_jobs import PAGEABLE, SAMPLER, Engine, Experts, GpuJob, Pipeline, Training
from benchmarks.diagnosis.recipe import Kind, Recipe, Recipes, Truth
from benchmarks.diagnosis.simulated_gpu import COMPUTE, COPIES, ELEMENTWISE, GEMMS, Gpu, mean_step_us, simulate, write

RECIPES = Recipes(Kind.GPU)
COPY_KERNEL = (
    "void at::native::elementwise_kernel<128, 4, at::native::gpu_kernel_impl_nocast<"
    "at::native::direct_copy_kernel_cuda(at::TensorIteratorBase&)::{lambda()#3}> >(int)"
)
SINGLE, DOUBLE = "ampere_sgemm_128x64_tn", "cutlass_80_tensorop_d884gemm_64x64_16x4_tn_align1"


def record(recipe: Recipe, directory: Path, seed: int, before: Path | None = None) -> Truth:
    """Write the traces for a recipe and compute the cost of its cause.

    The cost is the increase in mean step time over the same job without the cause. If `before` is given, the traces of
    the job without the cause are written to that directory.

    A recipe can set these options: ``job`` (job class), ``ranks``, ``steps``, ``sizes`` (job arguments, used with and
    without the cause), ``has_cost`` (False if the cost is unknown) and ``is_even`` (True if the job without the cause
    does the same work, divided evenly among the ranks).
    """
    kind: type[GpuJob] = recipe.options.get("job", Training)
    steps = []
    for is_planted in (False, True):
        job = kind(
            random=recipe.generator(seed), ranks=recipe.options.get("ranks", 1), **recipe.options.get("sizes", {})
        )
        is_even = not is_planted and recipe.options.get("is_even", False)
        if is_planted or is_even:
            recipe.plant(job)
        if is_even:
            job.is_even = True
        is_step = job.prefix == Training.prefix
        # A control has no cause. Its two jobs differ in kernel noise, which must not be reported as a change.
        is_other_noise = is_planted and recipe.answer is None
        gpus = simulate(
            job.step, seed=seed + is_other_noise, ranks=job.ranks, steps=recipe.options.get("steps", 10), marks=is_step
        )
        steps.append(mean_step_us(gpus, job.prefix))
        for gpu in gpus:
            job.after_last_step(gpu)
        if is_planted:
            write(gpus, directory)
        elif before:
            write(gpus, before)
    cost_us = steps[1] - steps[0] if recipe.answer and recipe.options.get("has_cost", True) else None
    return Truth(cost_us=cost_us, step_us=steps[1], places=job.places)


# Host waits for the device.


@RECIPES.planted(
    "item-per-layer",
    rules="host-sync synchronisation",
    cure=r"\.item|once|avoid",
    sizes={"product_us": (30, 40), "elementwise_us": 4.0},
)
def amber(job: Training) -> None:
    """Each layer reads several tensor values with ``.item()``."""
    count = job.random.randint(4, 7)

    def read(gpu: Gpu) -> None:
        for _ in range(count):
            gpu.item()

    job.at("layer", read)


@RECIPES.planted("output-to-host", rules="host-sync pageable-copies synchronisation", cure="pin|once|less|avoid")
def apricot(job: Training) -> None:
    """Each step copies a large output to the host for logging."""
    copy_us = job.random.uniform(2500, 4500)
    job.at(
        "forward",
        lambda gpu: gpu.copy("Memcpy DtoH (Device -> Pageable)", copy_us, waits=True, size=int(copy_us * 8e3)),
    )


@RECIPES.planted("pageable-upload", rules="pageable-copies", cure="pin")
def coral(job: Training) -> None:
    """The batch is copied from pageable memory."""
    job.upload, job.upload_us = PAGEABLE, job.random.uniform(1500, 2500)


# Device waits for the host.


@RECIPES.planted("loader-wait", rules="data-loading", cure="num_workers|background|prefetch")
def ebony(job: Training) -> None:
    """The data loader workers are too slow."""
    wait_us = job.random.uniform(3000, 6000)

    def wait(gpu: Gpu) -> None:
        with gpu.mark("enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__"):
            gpu.idle(wait_us)

    job.at("data", wait)
    job.places += ("DataLoader",)


@RECIPES.planted(
    "loader-wait-bursts", rules="data-loading", cure="num_workers|background|prefetch|ahead|worker", steps=16
)
def emerald(job: Training) -> None:
    """One of four data loader workers is slow."""
    wait_us = job.random.uniform(12_000, 20_000)

    def wait(gpu: Gpu) -> None:
        with gpu.mark("enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__"):
            gpu.idle(wait_us if gpu.step % 4 == 2 else 40)

    job.at("data", wait)
    job.places += ("DataLoader",)


@RECIPES.planted("collection", rules="garbage-collection", cure="gc")
def fawn(job: Training) -> None:
    """The garbage collector runs between the forward and the backward pass."""
    pause_us = job.random.uniform(6000, 9000)

    def pause(gpu: Gpu) -> None:
        with gpu.frame("train.py(44): advance"), gpu.frame("Python GC"):
            gpu.idle(pause_us)

    job.at("forward", pause)


@RECIPES.planted("python-code", rules="python python-code", cure="vectori|native|numpy|out of the step|C\\+\\+")
def flax(job: Training) -> None:
    """A Python function computes a metric while the device is idle."""
    work_us = job.random.uniform(6000, 9000)

    def work(gpu: Gpu) -> None:
        with gpu.frame("train.py(120): run"), gpu.frame("measures.py(31): edit_ratio"):
            gpu.idle(work_us)

    job.at("forward", work)


@RECIPES.planted("recompilation", rules="recompilation compilation", cure="dynamic|shape|mark_dynamic|pad")
def garnet(job: Training) -> None:
    """Every second step has new shapes, so the model is recompiled."""
    work_us = job.random.uniform(9000, 15_000)

    def compile_again(gpu: Gpu) -> None:
        if gpu.step % 2:
            dynamo = gpu.frame("torch/_dynamo/convert_frame.py(1290): __call__")
            with dynamo, gpu.frame("torch/_inductor/compile_fx.py(1590): compile_fx"):
                gpu.idle(work_us)

    job.at("data", compile_again)


@RECIPES.planted("graph-breaks", rules="graph-breaks recompilation host-bound", cure="graph break|fullgraph|break")
def ginger(job: Training) -> None:
    """The compiled model falls back to Python between compiled regions."""
    work_us = job.random.uniform(300, 500)

    def fall_back(gpu: Gpu) -> None:
        with gpu.mark("Torch-Compiled Region: 0/0"):
            gpu.launch(GEMMS[0], 40, op="## Call CompiledFxGraph fkx ##")
        gpu.sync(COMPUTE)
        with gpu.frame("torch/_dynamo/eval_frame.py(720): _fn"), gpu.frame("model.py(88): route"):
            gpu.idle(work_us)

    job.at("layer", fall_back)


@RECIPES.planted("checkpoint", rules="checkpoint", cure="async|background|less often|fewer")
def gold(job: Training) -> None:
    """Every step saves a checkpoint."""
    write_us = job.random.uniform(15_000, 25_000)

    def save(gpu: Gpu) -> None:
        with gpu.frame("torch/serialization.py(943): save"):
            gpu.copy("Memcpy DtoH (Device -> Pageable)", 900, waits=True, size=8_000_000)
            with gpu.frame("<built-in method write_record of PyTorchFileWriter object>"):
                gpu.idle(write_us)

    job.at("update", save)


@RECIPES.planted("allocator-churn", rules="allocation allocator", cure="expandable_segments|alloc")
def gray(job: Training) -> None:
    """Each layer frees and allocates device memory."""
    free_us, allocate_us = job.random.uniform(150, 300), job.random.uniform(200, 400)

    def churn(gpu: Gpu) -> None:
        gpu.allocate("cudaFree", free_us)
        gpu.allocate("cudaMalloc", allocate_us)

    job.at("layer", churn)


@RECIPES.planted(
    "small-kernels", rules="small-kernels host-bound launch-bound tiny-operators", cure="compile|fuse|graph"
)
def ivory(job: Training) -> None:
    """Each layer launches many kernels that take only a few microseconds."""
    count = job.random.randint(40, 70)

    def flock(gpu: Gpu) -> None:
        for _ in range(count):
            gpu.launch(ELEMENTWISE, 2.5, op="aten::add")

    job.at("layer", flock)


@RECIPES.planted("long-pause", rules="outlier-step unsteady-steps garbage-collection", cure="gc|see|view", steps=14)
def khaki(job: Training) -> None:
    """A long garbage collection delays one step."""
    pause_us = job.random.uniform(90_000, 150_000)

    def pause(gpu: Gpu) -> None:
        if gpu.step == 8:
            with gpu.frame("train.py(51): advance"), gpu.frame("Python GC"):
                gpu.idle(pause_us)

    job.at("forward", pause)


@RECIPES.planted(
    "waiting-trainer", rules="idle-trainer waiting idle idle-stage", cure="async|overlap|earlier|rollout|wait"
)
def lemon(job: Training) -> None:
    """The trainer waits for another process for most of the step."""
    wait_us = job.random.uniform(25_000, 45_000)

    def wait(gpu: Gpu) -> None:
        with gpu.frame("ray/_private/worker.py(2850): get"), gpu.frame("<built-in method wait of Event object>"):
            gpu.idle(wait_us)

    job.at("data", wait)


# Device work.


@RECIPES.planted(
    "single-precision", rules="fp32-gemm fp32", cure="TF32|bf16|bfloat16|autocast|set_float32", has_cost=False
)
def mauve(job: Training) -> None:
    """The matrix products run in float32."""
    job.products, job.gemm_us = (SINGLE,), job.gemm_us * 3


@RECIPES.planted("double-precision", rules="float64", cure="float32", has_cost=False)
def olive(job: Training) -> None:
    """One matrix product per layer runs in float64."""
    product_us = job.random.uniform(400, 700)
    job.at("layer", lambda gpu: gpu.launch(DOUBLE, product_us, op="aten::mm"))


@RECIPES.planted("unfused-activations", rules="pointwise", cure="compile|fuse")
def peach(job: Training) -> None:
    """Each layer runs ten large elementwise kernels."""
    kernel_us = job.random.uniform(50, 80)

    def activate(gpu: Gpu) -> None:
        for _ in range(10):
            gpu.launch(ELEMENTWISE, kernel_us, op="aten::mul")

    job.at("layer", activate)


@RECIPES.planted("layout-copies", rules="layout-copies copies redundant-copies", cure="contiguous|layout|channels_last")
def pearl(job: Training) -> None:
    """Each layer copies its input several times to change the memory layout."""
    kernel_us = job.random.uniform(80, 120)

    def turn(gpu: Gpu) -> None:
        for _ in range(4):
            with gpu.scope("cpu_op", "aten::contiguous"), gpu.scope("cpu_op", "aten::clone"):
                gpu.launch(COPY_KERNEL, kernel_us, op="aten::copy_")

    job.at("layer", turn)


@RECIPES.planted(
    "second-forward", rules="duplicated-work repeated-work", cure="once|reuse|twice", sizes={"has_modules": True}
)
def pink(job: Training) -> None:
    """A metric runs the forward pass a second time."""
    job.at("forward", job.forward)


@RECIPES.planted(
    "validation", rules="validation unsteady-steps outlier-step", cure="less often|fewer|separate", steps=15
)
def plum(job: Training) -> None:
    """Every fifth step evaluates the model on validation data."""

    def evaluate(gpu: Gpu) -> None:
        if gpu.step % 5 == 3:
            with gpu.frame("train.py(70): rate"):
                for _ in range(6 * job.layers):
                    job.layer(gpu, 1)

    job.at("update", evaluate)


@RECIPES.planted("throttling", rules="throttling clock slow-clock", cure="clock|power|cool|temperature", steps=16)
def puce(job: Training) -> None:
    """The device slows down halfway through the recording."""
    factor = job.random.uniform(1.4, 1.8)

    def throttle(gpu: Gpu) -> None:
        gpu.slowdown = factor if gpu.step >= 8 else 1.0

    job.at("data", throttle)
    job.places = ()


@RECIPES.planted("offloaded-activations", rules="exposed-copies", cure="overlap|stream|non_blocking")
def sand(job: Training) -> None:
    """Each step copies activations to pinned memory on a separate stream, and the update waits for the copies."""
    copy_us = job.random.uniform(3500, 5000)

    def offload(gpu: Gpu) -> None:
        gpu.depend(COPIES, COMPUTE)
        gpu.copy("Memcpy DtoH (Device -> Pinned)", copy_us, stream=COPIES, size=int(copy_us * 24e3))
        gpu.depend(COMPUTE, COPIES)

    job.at("backward", offload)


@RECIPES.planted("offloaded-gradients", rules="exposed-copies", cure="overlap|stream|non_blocking")
def sage(job: Training) -> None:
    """The host copies the gradients to pinned memory one at a time and waits for each copy."""
    copy_us = job.random.uniform(400, 600)

    def offload(gpu: Gpu) -> None:
        for _ in range(10):
            gpu.copy("Memcpy DtoH (Device -> Pinned)", copy_us, size=int(copy_us * 24e3))
            gpu.sync(COMPUTE)

    job.at("backward", offload)


@RECIPES.planted("convolution-layout", rules="layout-copies", cure="channels_last")
def saffron(job: Training) -> None:
    """Each convolution converts its input to another memory layout and its output back."""
    kernel_us = job.random.uniform(150, 200)

    def convolve(gpu: Gpu) -> None:
        for name in ("nchwToNhwcKernel", "nhwcToNchwKernel"):
            kernel = f"void cudnn::ops::{name}<__nv_bfloat16, __nv_bfloat16, float>(cudnn::ops::params_t<float>)"
            with gpu.scope("cpu_op", "aten::conv2d"):
                gpu.launch(kernel, kernel_us, op="aten::cudnn_convolution")

    job.at("layer", convolve)


@RECIPES.planted("printed-tensors", rules="output", cure="log less|less often")
def scarlet(job: Training) -> None:
    """Each step prints a tensor, which reads the values one at a time."""
    count = job.random.randint(60, 90)

    def show(gpu: Gpu) -> None:
        with gpu.frame("train.py(91): report"), gpu.frame("torch/_tensor_str.py(330): _tensor_str"):
            for _ in range(count):
                gpu.item()
                gpu.idle(20)

    job.at("update", show)


@RECIPES.planted("profiler-buffers", rules="profiler", cure="record|stacks|shapes", has_cost=False)
def sorrel(job: Training) -> None:
    """Launches wait while the profiler flushes its buffers."""
    flush_us = job.random.uniform(1200, 1800)

    def flush(gpu: Gpu) -> None:
        begin = gpu.now
        gpu.op("aten::view", flush_us)
        gpu.add("overhead", "Buffer Flush", begin + 1, gpu.now - 1)

    job.at("layer", flush)
    job.places = ()


# Multiple ranks.


@RECIPES.planted("late-rank", rules="straggler slow-rank", cure="rank", ranks=4)
def red(job: Training) -> None:
    """One rank runs a slow operator on the host."""
    late_us, rank = job.random.uniform(4000, 7000), job.random.randrange(4)
    job.at("data", lambda gpu: gpu.op("aten::sort", late_us), rank=rank)


@RECIPES.planted(
    "late-loader", rules="data-loading straggler slow-rank", cure="num_workers|background|prefetch", ranks=2
)
def rose(job: Training) -> None:
    """The data loader of one rank is slow."""
    late_us, rank = job.random.uniform(4000, 7000), job.random.randrange(2)

    def wait(gpu: Gpu) -> None:
        with gpu.mark("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"):
            gpu.idle(late_us)

    job.at("data", wait, rank=rank)


@RECIPES.planted(
    "slow-clock", rules="slow-clock clock straggler slow-rank slow-device", cure="clock|device|GPU|power", ranks=4
)
def ruby(job: Training) -> None:
    """All kernels on one rank take longer."""
    factor, rank = job.random.uniform(1.25, 1.5), job.random.randrange(4)

    def slow(gpu: Gpu) -> None:
        gpu.slowdown = factor

    job.at("data", slow, rank=rank)


@RECIPES.planted(
    "longer-sequences",
    rules="data-imbalance imbalance uneven-batches straggler slow-rank",
    cure="balance|even|same|pack",
    ranks=2,
    is_even=True,
)
def rust(job: Training) -> None:
    """One rank processes longer sequences."""
    rank, job.extra_us = job.random.randrange(2), job.gemm_us * job.random.uniform(0.5, 0.9)
    job.has_extra = lambda gpu: gpu.rank == rank
    job.be_at_rank(rank)


@RECIPES.planted(
    "changing-lengths",
    rules="imbalance data-imbalance uneven-batches",
    cure="balance|even|same|pack",
    ranks=4,
    steps=16,
    is_even=True,
)
def salmon(job: Training) -> None:
    """In each step, a different rank processes longer sequences."""
    job.extra_us = job.gemm_us * job.random.uniform(0.8, 1.2)
    job.has_extra = lambda gpu: gpu.step * 7 % 4 == gpu.rank


@RECIPES.planted(
    "no-overlap", rules="exposed-communication little-overlap no-overlap", cure="overlap|bucket|earlier", ranks=2
)
def sepia(job: Training) -> None:
    """Gradients are averaged only after the backward pass."""
    job.overlaps = False


@RECIPES.planted(
    "small-collectives",
    rules="small-collectives",
    cure="bucket|one|flatten|larger|fuse",
    ranks=2,
    sizes={"overlaps": False, "buckets": 8},
)
def sienna(job: Training) -> None:
    """Each gradient tensor has its own collective."""
    job.buckets = job.random.randint(250, 400)


@RECIPES.planted(
    "slow-link", rules="slow-collective slow-link", cure="NCCL|link|network|topology|bandwidth|interconnect", ranks=2
)
def silver(job: Training) -> None:
    """Collectives run at a fraction of the usual bandwidth."""
    job.bytes_per_us = 25_000 / job.random.uniform(8, 14)


@RECIPES.planted(
    "uneven-experts",
    rules="expert-imbalance imbalance straggler",
    cure="expert|balanc|capacity|router",
    job=Experts,
    ranks=4,
)
def tan(job: Experts) -> None:
    """The experts on one rank receive most of the tokens."""
    rank, most = job.random.randrange(4), job.random.uniform(2.2, 3.0)
    job.loads = tuple(most if index == rank else (4 - most) / 3 for index in range(4))
    job.be_at_rank(rank)


@RECIPES.planted(
    "few-microbatches", rules="pipeline-bubble", cure="microbatch|micro-batch|interleav", job=Pipeline, ranks=4
)
def teal(job: Pipeline) -> None:
    """The pipeline has as many microbatches as ranks."""
    job.microbatches = 4


@RECIPES.planted(
    "weight-broadcast", rules="weight-sync exposed-communication", cure="bucket|overlap|async|less|larger", ranks=2
)
def umber(job: Training) -> None:
    """The weights are sent to another role after each update."""
    job.broadcasts = 3 * job.layers
    job.places = (job.stages[3],)


# Engines.


@RECIPES.planted(
    "decode-without-graphs",
    rules="decode-launch-bound decode-without-graphs",
    cure="graph|enforce_eager",
    job=Engine,
    steps=40,
)
def violet(job: Engine) -> None:
    """The engine launches each decode kernel separately, without CUDA graphs."""
    job.graphs = False


@RECIPES.planted(
    "prefill-next-to-decode",
    rules="prefill-next-to-decode mixed-iterations mixed",
    cure="max.num.batched.tokens|prefill tokens|chunk",
    job=Engine,
    steps=40,
)
def walnut(job: Engine) -> None:
    """Long prompts are prefilled in the same iterations as decodes."""
    job.prefill_every, job.prefill_tokens = 8, job.random.randint(1500, 2000)


@RECIPES.planted("slow-sampler", rules="sampler", cure="sampl|top_k|top-k", job=Engine, steps=40)
def wine(job: Engine) -> None:
    """Sampling takes as long as the model."""
    kernel_us = job.random.uniform(800, 1200)

    def sample(gpu: Gpu) -> None:
        gpu.launch("void at::native::radixSortKVInPlace<long, 2, int, float>(float*)", kernel_us, op="aten::sort")
        gpu.launch(SAMPLER, kernel_us, op="aten::multinomial")

    job.at("sample", sample)


@RECIPES.planted(
    "rejected-drafts",
    rules="rejected-speculation",
    cure="draft fewer|num_speculative_tokens|draft model",
    job=Engine,
    steps=40,
    has_cost=False,
)
def wren(job: Engine) -> None:
    """The model rejects most draft tokens."""
    job.drafts, job.rejected = 4, 3


@RECIPES.planted(
    "detokenising", rules="detokenisation", cure="process|several|batch", job=Engine, steps=40, has_cost=False
)
def wyvern(job: Engine) -> None:
    """The engine converts tokens to text between iterations."""
    work_us = job.random.uniform(500, 900)

    def convert(gpu: Gpu) -> None:
        with (
            gpu.frame("engine/output_processor.py(310): process_outputs"),
            gpu.frame("engine/detokenizer.py(88): update"),
        ):
            gpu.idle(work_us)

    job.at("after", convert)


# Problems with the recording.


@RECIPES.planted("device-not-recorded", rules="device-not-recorded", cure="profiler|CUPTI|record", has_cost=False)
def yellow(job: Training) -> None:
    """The trace contains launches but no kernels."""

    def remove(gpu: Gpu) -> None:
        gpu.events[:] = [event for event in gpu.events if event["cat"] not in {"kernel", "gpu_memcpy", "cuda_sync"}]

    job.after_last_step = remove


@RECIPES.planted(
    "profiler-overhead", rules="profiler-overhead profiler", cure="stack|fewer|profile_memory|record_shapes|option"
)
def zinc(job: Training) -> None:
    """The profiler blocks the host several times per step to request buffers."""
    pause_us = job.random.uniform(1500, 2500)

    def pause(gpu: Gpu) -> None:
        begin = gpu.now
        gpu.idle(pause_us)
        gpu.add("overhead", "Activity Buffer Request", begin, gpu.now)
        gpu.sync(COMPUTE)

    for position in ("forward", "backward", "update"):
        job.at(position, pause)
    job.places = ()


# Controls.


@RECIPES.control("device-bound")
def white(_: Training) -> None:
    """The device is always busy."""


@RECIPES.control("no-wait-in-step", sizes={"reads_loss": False})
def whey(_: Training) -> None:
    """The host never waits for the device."""


@RECIPES.control("run-ahead", sizes={"reads_loss": False, "product_us": (400, 500)}, steps=14)
def wattle(job: Training) -> None:
    """The host runs ahead until the launch queue is full."""

    def launch(gpu: Gpu) -> None:
        for _ in range(6):
            gpu.launch(GEMMS[0], 60)

    job.at("layer", launch)


@RECIPES.control("tf32-products")
def wick(job: Training) -> None:
    """The matrix products have float32 operands but run in TF32."""
    job.products = (
        "sm80_xmma_gemm_f32f32_tf32f32_f32_tn_n_tilesize128x128x32_stage4_warpsize2x2x1_tensor16x8x8_execute_kernel",
        "void cutlass::Kernel2<cutlass_80_tensorop_s1688gemm_256x128_16x3_tn_align4>(Params)",
    )


@RECIPES.control("overlapped-ranks", ranks=4)
def wheat(_: Training) -> None:
    """Communication overlaps with compute, and the ranks are balanced."""


@RECIPES.control("jitter", ranks=2, steps=20)
def willow(job: Training) -> None:
    """Both ranks have small random delays."""
    job.at("data", lambda gpu: gpu.idle(job.random.uniform(0, 120)))


@RECIPES.control("loader-ahead", steps=16)
def wisteria(job: Training) -> None:
    """The data loader always has the next batch ready."""

    def fetch(gpu: Gpu) -> None:
        with gpu.mark("enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__"):
            gpu.idle(60)

    job.at("data", fetch)


@RECIPES.control("even-experts", job=Experts, ranks=4, sizes={"product_us": (500, 700)})
def wood(_: Experts) -> None:
    """All experts receive the same number of tokens."""


@RECIPES.control("decode-with-graphs", job=Engine, steps=40)
def woad(_: Engine) -> None:
    """Decode iterations use CUDA graphs."""


@RECIPES.control("two-batches", sizes={"has_modules": True})
def wagon(job: Training) -> None:
    """Each step runs the model on a second batch, and both have a backward pass."""

    def again(gpu: Gpu) -> None:
        first = gpu.sequence
        job.forward(gpu)
        for layer in reversed(range(job.layers)):
            job.backward(gpu, first + layer)

    job.at("forward", again)


@RECIPES.control("activation-checkpoints", sizes={"has_modules": True})
def walrus(job: Training) -> None:
    """The backward pass recomputes the activations of the forward pass."""

    def recompute(gpu: Gpu) -> None:
        with gpu.frame("torch/utils/checkpoint.py(1100): unpack_hook"):
            job.forward(gpu)

    job.at("backward", recompute)


@RECIPES.control("old-probabilities", sizes={"has_modules": True})
def wasp(job: Training) -> None:
    """The step computes the log probabilities of the old weights in a separate stage."""

    def score(gpu: Gpu) -> None:
        job.forward(gpu)

    job.at("data", score)


@RECIPES.control("compiled-layers")
def water(job: Training) -> None:
    """Each layer is compiled without graph breaks."""

    def compiled(gpu: Gpu) -> None:
        with (
            gpu.frame("torch/_dynamo/eval_frame.py(720): _fn"),
            gpu.frame("model.py(88): forward"),
            gpu.mark("Torch-Compiled Region: 0/0"),
        ):
            gpu.launch(GEMMS[0], 60, op="## Call CompiledFxGraph fkx ##")

    job.at("layer", compiled)


@RECIPES.control("longer-batches", steps=16, tolerates="unsteady-steps")
def wave(job: Training) -> None:
    """The second half of the steps has longer sequences."""

    def lengthen(gpu: Gpu) -> None:
        job.length = 1.4 if gpu.step >= 8 else 1.0

    job.at("data", lengthen)


@RECIPES.control("varying-clock", ranks=2, steps=16)
def wheel(job: Training) -> None:
    """The clock rate of every device varies by a few percent from step to step."""

    def vary(gpu: Gpu) -> None:
        gpu.slowdown = 1 + 0.03 * (gpu.step % 3)

    job.at("data", vary)


@RECIPES.control("accepted-drafts", job=Engine, steps=40)
def wolf(job: Engine) -> None:
    """The model accepts most draft tokens."""
    job.drafts, job.rejected = 4, 1


@RECIPES.control("short-detokenising", job=Engine, steps=40)
def worm(job: Engine) -> None:
    """The engine spends little time converting tokens to text."""

    def convert(gpu: Gpu) -> None:
        with gpu.frame("engine/detokenizer.py(88): update"):
            gpu.idle(60)

    job.at("after", convert)


@RECIPES.control("small-kernels-of-a-graph", job=Engine, steps=40)
def yak(job: Engine) -> None:
    """Each kernel in the CUDA graph takes only a few microseconds."""
    job.kernel_us, job.kernels = 4.0, 600


@RECIPES.control("helper-functions", steps=16)
def yew(job: Training) -> None:
    """Several short functions run while the device is busy."""

    def helpers(gpu: Gpu) -> None:
        with gpu.frame("train.py(20): bookkeeping"):
            for index in range(4):
                with gpu.frame(f"train.py({30 + index}): part_{index}"):
                    gpu.idle(40)

    job.at("forward", helpers)
