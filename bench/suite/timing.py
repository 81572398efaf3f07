"""Runs one process of one program, times its steps and takes its peak of memory."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import ClassVar

from .setups import Setup
from .task import HERE, Task

LATE = "took longer than --patience"


@dataclass
class Timing:
    """The steps of one process; seconds are wall seconds. `error` says why there are none."""

    task: str
    repeat: int
    setup: Setup
    losses: list = field(default_factory=list)
    seconds: list = field(default_factory=list)
    cpu_seconds: list = field(default_factory=list)
    peak_bytes: int = 0
    whole_seconds: float = 0.0  # of the process
    load_average: float = 0.0
    error: str = ""

    SETUP: ClassVar = Setup

    def cores(self, warmup: int) -> float:
        """Processor seconds a second: less than the number of threads where other programs were in the way."""
        return sum(self.cpu_seconds[warmup:]) / sum(self.seconds[warmup:])

    @property
    def is_late(self) -> bool:
        return self.error.startswith(LATE)

    def noted(self, note: dict) -> None:
        """Keeps what a program reports at its end, or in every step's metrics; nothing here."""

    def to_json(self) -> dict:
        return asdict(self)

    @classmethod
    def from_json(cls, value: dict) -> "Timing":
        return cls(**value | {"setup": cls.SETUP(**value["setup"])})


def environment(args) -> dict:
    """Threads for all; for torch also malloc settings that keep freed pages, which is its best on this workload."""
    keep = str(1 << 32)
    return os.environ | args.torch_environment | {
        "OMP_NUM_THREADS": str(args.threads), "MKL_NUM_THREADS": str(args.threads), "TOKENIZERS_PARALLELISM": "false",
        "MALLOC_MMAP_THRESHOLD_": keep, "MALLOC_TRIM_THRESHOLD_": keep, "HF_HUB_OFFLINE": "1",
        "BENCH_CACHE": str(args.work / "datasets"), "PYTHONDONTWRITEBYTECODE": "1",
    }


def without_broken_tiles(python: str) -> dict:
    """Environment that limits torch to the best instruction set below AMX, where oneDNN's bf16 matmul crashes: a hypervisor
    shows AMX but not its tile sizes, so oneDNN configures none. Tandem needs no limit."""
    product = "import torch; a = torch.ones(64, 64).bfloat16(); a @ a"
    if subprocess.run([python, "-c", product], stderr=subprocess.DEVNULL).returncode != -signal.SIGILL:
        return {}
    level = {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"}
    print(f"torch crashes in a bf16 matmul on this machine; it runs with {level}", file=sys.stderr)
    return level


def run(setup: Setup, task: Task, repeat: int, args) -> Timing:
    """A failure is a timing that says so."""
    timing = Timing(task.name, repeat, setup, load_average=os.getloadavg()[0])
    with logged(timing, task, args) as log:
        if setup.program == "Tandem":
            output = run_folder(setup, task, args)
            run_tandem(timing, [write_config(setup, task, output, args)], output, log, args)
        else:
            run_python(timing, command(setup, task, args), environment(args), log, args)
    return timing


def run_folder(setup: Setup, task: Task, args) -> Path:
    return args.work / f"run-{task.name}-{setup.name}".replace(" ", "-")


@contextmanager
def logged(timing: Timing, task: Task, args):
    """Times a whole process, and says in the end why it failed, if it did. Gives the file of its log."""
    start = time.perf_counter()
    log = args.work / f"{timing.setup.program.lower()}.log"
    with log.open("w") as file:
        yield file
    timing.whole_seconds = time.perf_counter() - start
    if not timing.error and len(timing.losses) != task.steps:
        timing.error = f"{len(timing.losses)} steps of {task.steps}"
    if timing.error:
        last = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()][-1:]
        # Names of files without where they lie on this machine.
        timing.error = re.sub(r"/\S*/", "", ": ".join([timing.error, *last]))[:300]
        log.replace(log.with_name(f"failed-{task.name}-{timing.setup.name}.log".replace(" ", "-")))


def reap(process, timing: Timing, timed_out: bool) -> None:
    """Waits for a child; its peak of resident bytes is the kernel's (VmHWM)."""
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    timing.peak_bytes = usage.ru_maxrss * 1024
    if timed_out:
        timing.error = LATE
    elif process.returncode == -signal.SIGKILL:
        timing.error = "killed, as by a machine that is out of memory"
    elif process.returncode:
        timing.error = f"exit code {process.returncode}"


def command(setup: Setup, task: Task, args) -> list:
    """Command of TRL or Mitchell's trainer."""
    common = [str(task.folder), "--shape", task.shape, "--recipe", setup.recipe, "--dtype", setup.dtype,
              "--steps", str(task.steps), "--threads", str(args.threads), "--pairs", str(task.facts["pairs_per_step"])]
    if setup.program == "TRL":
        return [HERE / "trl_step.py", *common, "--attention", setup.attention]
    return [HERE / "mitchell_step.py", args.mitchell, *common]


def run_python(timing: Timing, command: list, environment: dict, log, args, watch=lambda pid: None) -> None:
    """A program that prints a line of JSON a step. `watch` is called all the while."""
    process = subprocess.Popen([args.python, *command], stdout=subprocess.PIPE, stderr=log, env=environment)
    deadline, buffer = time.monotonic() + args.patience, b""
    os.set_blocking(process.stdout.fileno(), False)
    timed_out = False
    while True:
        done = is_done(process)
        buffer += process.stdout.read() or b""
        if done:
            break
        watch(process.pid)
        if not timed_out and time.monotonic() > deadline:
            timed_out = True
            process.kill()
        time.sleep(0.05)
    for line in buffer.decode().splitlines():
        if line.startswith('{"step"'):
            step = json.loads(line)
            timing.losses.append(step["loss"])
            timing.seconds.append(step["seconds"])
            timing.cpu_seconds.append(step["cpu_seconds"])
            timing.noted(step)
        elif line.startswith('{"note"'):
            timing.noted(json.loads(line)["note"])
    process.stdout.close()
    reap(process, timing, timed_out)


def is_done(process) -> bool:
    return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def write_config(setup: Setup, task: Task, output: Path, args, compute: str = "", micro_batch_tokens: int = 0) -> Path:
    """With `compute` instead of the table for the processor, and with other micro-batches than all set-ups'."""
    config = output.with_suffix(".toml")
    drawn = task.facts.get("weights") == "random"
    weights = 'weights = "random"' if drawn else ""
    has_adapter = (task.folder / "adapter").exists()
    start = f'start = "{task.folder}/adapter"' if has_adapter else "rank = 16"
    adapter = "" if setup.adapter == "full" else f"[adapter]\n{start}"
    second = f'model = "{task.folder}/model"' if setup.reference == "model" and not drawn else ""
    reference = "" if setup.method == "sft" else f'[reference]\nkind = "{setup.reference}"\n{second}'
    objective = "" if setup.method == "sft" else '[objective]\nloss = "sigmoid"\nbeta = 0.1'
    format_ = 'format = "nf4"' if setup.adapter == "qlora" else ""
    compute = compute or f'''devices = "cpu"
dtype = "{setup.dtype}"
threads = {args.threads}'''
    config.write_text(f'''method = "{setup.method}"
model = "{task.folder}/model"
{weights}
output = "{output}"
seed = 42
{adapter}
{reference}
[data]
train = "{task.file(setup.method)}"
max_length = {task.facts.get("max_length", 1024)}
order = "sequential"
cache = "{args.work}/tokens"
{objective}
[train]
batch_size = {task.facts["pairs_per_step"]}
micro_batch_tokens = {micro_batch_tokens or args.micro_batch_tokens}
steps = {task.steps}
optimizer = "adamw"
learning_rate = 1e-4
schedule = "linear"
warmup_steps = 2
max_grad_norm = 1.0
weight_decay = 0.0
[compute]
{compute}
{format_}
''')
    return config


def cpu_clock(pid: int) -> float:
    """User and system seconds of a process so far, from /proc."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except FileNotFoundError:
        return float("nan")
    return (int(stat[11]) + int(stat[12])) / os.sysconf("SC_CLK_TCK")


def run_tandem(timing: Timing, words: list, output: Path, log, args, watch=lambda pid: None) -> None:
    """`words` are the configuration's file and options. Steps are timed from outside, by the arrival of their lines in metrics.jsonl. `watch` is called all the while."""
    shutil.rmtree(output, ignore_errors=True)
    process = subprocess.Popen([args.tandem, "train", *words], stdout=log, stderr=log)
    metrics, seen, buffer = output / "metrics.jsonl", 0, ""
    last = last_cpu = None
    deadline, timed_out = time.monotonic() + args.patience, False
    while True:
        done = is_done(process)
        if metrics.exists():
            with metrics.open() as file:
                file.seek(seen)
                buffer += file.read()
                seen = file.tell()
        now, cpu = time.perf_counter(), cpu_clock(process.pid)
        while "\n" in buffer:
            line, buffer = buffer.split("\n", 1)
            step = json.loads(line)
            if step.get("split") == "train":
                timing.losses.append(step["loss"])
                # The first step has no line before it to be timed from; it is warm-up in any case.
                timing.seconds.append(now - last if last else None)
                timing.cpu_seconds.append(cpu - last_cpu if last else None)
                timing.noted(step)
                last, last_cpu = now, cpu
        if done:
            break
        watch(process.pid)
        if not timed_out and time.monotonic() > deadline:
            timed_out = True
            process.kill()
        time.sleep(0.002)
    reap(process, timing, timed_out)
    shutil.rmtree(output, ignore_errors=True)
