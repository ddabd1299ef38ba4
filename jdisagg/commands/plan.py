"""Finds the best layout of N devices for a workload: the architecture, its meshes and settings.

    python -m jdisagg plan --model=llama3-70b --hardware=h100 --devices=32 --trace=azure:FILE --arrivals=poisson
        --slo_ttft_s=1 --slo_tpot_s=0.05 --rate=40 --output=plan.toml
    python -m jdisagg plan --model=llama3-8b --hardware=a100 --devices=4 --trace=mix:2000+200@0.7,300+500@0.3 --quick

Configurations are refused by arithmetic if that suffices. The others are simulated with the serving router and
workers, to find the highest rate at which --attainment of the requests meet both objectives. The answer is "do not
disaggregate" if a pair of pools does not win by more than noise. --output is a file for `jdisagg launch --config`.

    python -m jdisagg plan --emit=slurm,k8s --config=plan.toml

--emit writes the job of a plan just made, or else of --config's file: launch/slurm.sbatch, launch/k8s/,
launch/gke_tpu/, launch/compose.yaml with a Dockerfile.

A trace is azure:FILE, mooncake:FILE, lengths:FILE, or mix: INPUT+OUTPUT@SHARE, with commas. --quick simulates
nothing.
"""

from __future__ import annotations

import importlib
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from absl import flags as absl_flags
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from jdisagg import command, flags
from jdisagg.cluster import compose, kubernetes, slurm
from jdisagg.cluster.job import ClusterJob, job_of, with_fronts
from jdisagg.core.errors import ConfigError, FlagError
from jdisagg.core.mesh_spec import Schedule
from jdisagg.core.profile import read_profile
from jdisagg.core.router_config import RESERVE_TOKENS
from jdisagg.core.settings import Settings, int_list
from jdisagg.core.worker_config import TransferMode
from jdisagg.sim.arithmetic import DTYPE_BYTES
from jdisagg.sim.cluster_spec import CostOf, by_roofline, longest, published
from jdisagg.sim.cost_models import ENGINES, Model, Roofline
from jdisagg.sim.hardware import hardware, model_of
from jdisagg.sim.planner import recommendation as tables
from jdisagg.sim.planner.limits import estimates
from jdisagg.sim.planner.problem import Objectives, Problem, WorkloadSpec
from jdisagg.sim.planner.recommendation import RecommendedPlan, as_policy, headroom, recommend, settings_of, total, vary
from jdisagg.sim.planner.search import SearchRun
from jdisagg.sim.planner.space import CandidateBuilder, CandidateSource, PlanCandidate, ProfiledCandidateBuilder, paired
from jdisagg.sim.traces.workloads import read_workload

# The files of a job as `--emit` writes them: the output of `jdisagg.cluster` as text.

KINDS = ("slurm", "k8s", "gke_tpu", "compose")
WIDTH = 120


@dataclass(frozen=True)
class JobValues:
    """The values of a job beside the settings of its processes; `note` is the first line of every file."""

    settings: Settings
    name: str
    image: str
    devices_per_host: int
    tpu: str
    note: str
    routers: int = 0  # 0: two if Kubernetes has a lease for them, else one
    fronts: int = -1  # -1: two if there are several routers, else none
    namespace: str = "default"

    @property
    def platform(self) -> str:
        return "gpu" if self.settings.platform == "auto" else self.settings.platform

    def job(self) -> ClusterJob:
        """Returns the job. Raises ConfigError if it cannot be placed."""
        return self._with_fronts(job_of(self.settings, self.name, self.image, self.platform, self.devices_per_host))

    def whole(self, platform: str) -> ClusterJob:
        """Returns the job with every worker as one process, not yet cut into hosts. Raises ConfigError."""
        return self._with_fronts(job_of(self.settings, self.name, self.image, platform, kubernetes.WHOLE))

    def _with_fronts(self, job: ClusterJob) -> ClusterJob:
        routers = self.routers or (1 if self.fronts == 0 else 2)
        fronts = self.fronts if self.fronts >= 0 else 2 * (routers > 1)
        return replace(with_fronts(job, routers, fronts), namespace=self.namespace)

    def with_one_server(self, kind: str) -> JobValues:
        """Returns the values with one router and no fronts. Raises ConfigError if more are requested."""
        if self.routers not in (0, 1) or self.fronts not in (-1, 0):
            problem_flags = f"--routers={self.routers} and --fronts={self.fronts}"
            raise ConfigError(
                f"{problem_flags}: --emit={kind} starts one router and no fronts; k8s and gke_tpu have them"
            )
        if self.settings.coordination:
            problem_flags = f"--coordination={self.settings.coordination}"
            raise ConfigError(
                f"{problem_flags}: --emit={kind} starts one router, which needs none; k8s and gke_tpu have more"
            )
        return replace(self, routers=1, fronts=0)


def settings_of_file(path: str) -> Settings:
    """Reads the settings of --config=PATH without the environment. Raises ConfigError."""
    settings = Settings(**flags.read_toml(path, flags.define_settings(flags.own())))
    settings.check()
    return settings


def files(values: JobValues, kinds: Sequence[str]) -> dict[str, str]:
    """Returns file name -> text of these kinds. Raises ConfigError."""
    unknown = [each for each in kinds if each not in KINDS]
    if unknown:
        raise FlagError(f"--emit names {unknown[0]!r}, must be of {', '.join(KINDS)}")
    texts: dict[str, str] = {}
    for kind in kinds:
        texts |= WRITERS[kind](values)
    return texts


def idle_chips(values: JobValues, kinds: Sequence[str]) -> list[str]:
    """Returns a line for each role whose workers leave chips of their slices idle."""
    if "gke_tpu" not in kinds:
        return []
    lines = []
    for part in values.whole("tpu").parts:
        needed = part.size * part.devices
        chips, topology = kubernetes.SLICES[values.tpu].topology(needed)
        if chips != needed:
            idle = part.replicas * (chips - needed)
            lines.append(
                f"{part.role}: {part.replicas} slices of {chips} {values.tpu} chips ({topology})"
                f" for workers of {needed}: {idle} chips stay idle"
            )
    return lines


def write_files(folder: str, texts: Mapping[str, str]) -> list[Path]:
    """Writes the files. Raises ConfigError if one cannot be written."""
    paths = [Path(folder) / name for name in texts]
    for path, text in zip(paths, texts.values(), strict=True):
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"--job_folder={folder}: {path}: {error.strerror}") from error
    return paths


def _slurm(values: JobValues) -> dict[str, str]:
    if values.platform == "tpu":
        raise ConfigError("--emit=slurm is for GPUs and CPUs: of TPUs gke_tpu has slices")
    values = values.with_one_server("slurm")
    return {"slurm.sbatch": slurm.script(values.job(), values.note)}


def _kubernetes(values: JobValues) -> dict[str, str]:
    if values.platform == "tpu":
        raise ConfigError("--emit=k8s is for GPUs and CPUs: of TPUs gke_tpu has slices")
    job = values.job()
    kinds = {
        "router": kubernetes.router(job),
        "lws": kubernetes.leader_worker_sets(job),
        "disaggregatedset": kubernetes.disaggregated_set(job),
        "jobset": kubernetes.job_sets(job),
    }
    if kubernetes.scaled(job):
        kinds |= {"hpa": kubernetes.pod_autoscalers(job), "keda": kubernetes.scaled_objects(job)}
    return {f"k8s/{name}.yaml": _yaml(documents, values.note) for name, documents in kinds.items()}


def _gke_tpu(values: JobValues) -> dict[str, str]:
    if values.tpu not in kubernetes.SLICES:
        raise FlagError(f"--tpu is {values.tpu!r}, must be one of {', '.join(kubernetes.SLICES)}")
    made = kubernetes.manifests(values.whole("tpu"), values.tpu)
    return {f"gke_tpu/{name}": _yaml(documents, values.note) for name, documents in made.items()}


def _compose(values: JobValues) -> dict[str, str]:
    values = values.with_one_server("compose")
    job = values.whole(values.platform)
    return {
        "compose.yaml": _yaml([compose.compose(job)], values.note),
        "Dockerfile": compose.dockerfile(job, values.note),
    }


WRITERS = {"slurm": _slurm, "k8s": _kubernetes, "gke_tpu": _gke_tpu, "compose": _compose}


def _yaml(documents: Sequence[dict[str, Any]], note: str) -> str:
    """Returns YAML text. Raises ConfigError if PyYAML is not installed."""
    try:
        yaml = importlib.import_module("yaml")
    except ImportError as error:
        raise ConfigError("--emit writes YAML and PyYAML is not here: pip install pyyaml") from error

    class YamlWriter(yaml.SafeDumper):
        """A YAML writer without anchors: repeated values are written again."""

        def ignore_aliases(self, data: Any) -> bool:
            return True

    text = yaml.dump_all(documents, Dumper=YamlWriter, sort_keys=False, width=WIDTH, explicit_start=len(documents) > 1)
    return f"# {note}\n{text}"


LAUNCH_DTYPES = ("bfloat16", "float32")


def declare() -> flags.FlagValues:
    values = flags.own()
    _define_question(values)
    _define_costs(values)
    _define_search(values)
    flags.define(values, output="")
    absl_flags.DEFINE_string("checkpoint", "", "--output: the model's folder there", flag_values=values)
    _define_job(values)
    return values


def _define_job(values: flags.FlagValues) -> None:
    absl_flags.DEFINE_list("emit", [], f"jobs to write: {', '.join(KINDS)}", flag_values=values)
    absl_flags.DEFINE_string("job_folder", "launch", "--emit: where they are written", flag_values=values)
    absl_flags.DEFINE_integer(
        "routers", 0, "--emit: routers, of which one leads by a lease; 0: 2 on Kubernetes, else 1", flag_values=values
    )
    absl_flags.DEFINE_integer(
        "fronts",
        -1,
        "--emit: processes that serve clients; 0: the router does; -1: 2 beside several routers, else 0",
        flag_values=values,
    )
    absl_flags.DEFINE_string("namespace", "default", "--emit: Kubernetes namespace of the job", flag_values=values)
    flags.define(values, job_name="jdisagg", image="jdisagg:latest", devices_per_host=8, tpu="v5p", platform="auto")


def _define_question(values: flags.FlagValues) -> None:
    flags.define(values, model="llama3-8b", devices=8, trace="", rate=0.0, inputs=1.0, outputs=1.0, max_model_len=0)
    absl_flags.DEFINE_enum(
        "arrivals", "poisson", ["poisson", "recorded"], "drawn, or the trace's own", flag_values=values
    )
    flags.define(values, slo_ttft_s=1.0, slo_tpot_s=0.05, attainment=0.9)


def _define_costs(values: flags.FlagValues) -> None:
    kinds = {"engine": list(ENGINES), "dtype": list(DTYPE_BYTES)}
    flags.define(values, kinds, cost="roofline", engine="distserve", hardware="h100", dtype="bfloat16", host_s=1e-3)
    absl_flags.DEFINE_string(
        "link",
        "nic",
        "a device's way to the other pool: nic or node (of --hardware), none, or GB/s",
        flag_values=values,
    )
    absl_flags.DEFINE_integer(
        "domain_devices",
        0,
        "devices of a node or slice, with fast links inside: pairs are also tried within such; 0: --link is all",
        0,
        flag_values=values,
    )
    absl_flags.DEFINE_float("usd_per_hour", 0.0, "of a device; 0: the hardware's", 0.0, flag_values=values)


def _define_search(values: flags.FlagValues) -> None:
    absl_flags.DEFINE_string("tps", "1,2,4,8", "tensor parallel sizes to try", flag_values=values)
    absl_flags.DEFINE_string("pps", "1,2,4", "pipeline stages to try", flag_values=values)
    absl_flags.DEFINE_string("prefill_pps", "1", "stages of a prefill worker to try", flag_values=values)
    absl_flags.DEFINE_list("schedules", list(Schedule), "how decode pipelines run, to try", flag_values=values)
    absl_flags.DEFINE_string("chunks", "512,1024,2048,4096", "prefill chunks to try, tokens", flag_values=values)
    absl_flags.DEFINE_list("transfers", ["chunk", "layer", "whole"], "when KV leaves, to try", flag_values=values)
    flags.define(values, max_num_seqs=0, page_size=32, reserve_tokens=RESERVE_TOKENS, seed=0)
    absl_flags.DEFINE_integer("most", 24, "configurations of an architecture to simulate", 1, flag_values=values)
    absl_flags.DEFINE_integer("seeds", 3, "of the shortlist's runs, from --seed on", 1, flag_values=values)
    absl_flags.DEFINE_bool("quick", False, "arithmetic only: bounds, and replicas for --rate", flag_values=values)
    absl_flags.DEFINE_bool("sensitivity", True, "ask again with other objectives and half the link", flag_values=values)
    absl_flags.DEFINE_float("p_correction_factor", 1.0, "--quick: TTFT observed / expected", 0.0, flag_values=values)
    absl_flags.DEFINE_float("d_correction_factor", 1.0, "--quick: gap observed / expected", 0.0, flag_values=values)


def link_bytes_per_s(values: flags.FlagValues) -> float:
    """Returns the bandwidth of one device, one way; 0: no limit is modelled. Raises FlagError."""
    chip = hardware(values.hardware)
    bandwidths = {"nic": chip.nic_bytes_per_s * chip.link, "node": chip.link_bytes_per_s * chip.link, "none": 0.0}
    if values.link in bandwidths:
        return bandwidths[values.link]
    try:
        rate = float(values.link) * 1e9
    except ValueError as error:
        raise FlagError(f"--link is {values.link!r}, must be one of {', '.join(bandwidths)}, or GB/s") from error
    if not rate > 0:
        raise FlagError(f"--link is {values.link}, must be above 0; none is the word for a link without limits")
    return rate


def costs(values: flags.FlagValues) -> CostOf:
    if values.cost == "distserve":
        return published(values.model, values.engine, values.host_s)
    if values.cost != "roofline":
        raise FlagError(f"--cost={values.cost!r}, must be distserve, roofline or profile:FILE")
    chip, shape = hardware(values.hardware), Model(model_of(values.model), values.dtype)
    return by_roofline(lambda tp: Roofline(shape, chip, tp, values.dtype, values.host_s), values.domain_devices)


def builder_of(values: flags.FlagValues, most_tokens: int) -> CandidateBuilder | ProfiledCandidateBuilder:
    kind, _, path = values.cost.partition(":")
    if kind == "profile":
        return ProfiledCandidateBuilder(read_profile(path))
    settings = Settings(
        max_model_len=most_tokens,
        page_size=values.page_size,
        max_num_seqs=values.max_num_seqs,
        reserve_tokens=values.reserve_tokens,
        mixed_steps="off",  # bounds by arithmetic assume prompts and decode rows in separate steps
        prefix_caching="off",  # the workload's prompts have no common prefixes
    )
    chip = hardware(values.hardware)
    return CandidateBuilder(settings, costs(values), link_bytes_per_s(values), chip.link_bytes_per_s * chip.link)


def question(values: flags.FlagValues) -> tuple[Problem, CandidateBuilder | ProfiledCandidateBuilder]:
    lengths = read_workload(values.trace).scaled_lengths(values.inputs, values.outputs)
    if values.max_model_len:
        lengths = lengths.rows(lengths.input_tokens + lengths.output_tokens <= values.max_model_len)
    builder = builder_of(values, longest(lengths))
    if isinstance(builder, ProfiledCandidateBuilder) and longest(lengths) > builder.max_model_len:
        raise ConfigError(
            f"the workload has requests of {longest(lengths)} tokens, the profile's workers take"
            f" {builder.max_model_len}: --max_model_len={builder.max_model_len} leaves the longer ones out"
        )
    objectives = Objectives(values.slo_ttft_s, values.slo_tpot_s, values.attainment)
    workload = WorkloadSpec(lengths, values.arrivals == "recorded")
    return Problem(workload, objectives, builder.build, values.devices, values.seed), builder


def space(values: flags.FlagValues, builder: CandidateBuilder | ProfiledCandidateBuilder) -> CandidateSource:
    profiled = isinstance(builder, ProfiledCandidateBuilder)
    for name, words in (("transfers", TransferMode), ("schedules", Schedule)):
        unknown = [each for each in getattr(values, name) if each not in list(words)]
        if unknown:
            raise FlagError(f"--{name} names {unknown[0]!r}, must be of {', '.join(words)}")
    hosts = {} if profiled else hosts_of(values)
    found = CandidateSource(
        values.devices,
        int_list(values.tps, "tps"),
        int_list(values.pps, "pps"),
        (builder.chunk_tokens,) if profiled else int_list(values.chunks, "chunks"),
        tuple(TransferMode(each) for each in values.transfers),
        domain_devices=0 if profiled else values.domain_devices,
        schedules=tuple(map(Schedule, values.schedules)),
        prefill_pps=int_list(values.prefill_pps, "prefill_pps"),
        **hosts,
    )
    if next(iter(found), None) is None:
        sizes = hosts.get("slice_devices") or f"at most {values.devices}"
        raise ConfigError(
            f"no worker of --tps={values.tps} --pps={values.pps} can be placed on {values.devices} x"
            f" {values.hardware}: a worker has {sizes} devices,"
            f" on whole hosts of {hosts.get('host_devices', 'any size')}"
        )
    return found


def hosts_of(values: flags.FlagValues) -> dict[str, Any]:
    """Returns the limits on a worker's devices: TPU slices as GKE has them, else hosts of `--devices_per_host`."""
    slices = kubernetes.SLICES.get(values.hardware)
    if slices is None:
        return {"host_devices": values.devices_per_host}
    return {"slice_devices": tuple(slices.topologies), "host_devices": max(slices.one_host)}


def check_chip(values: flags.FlagValues) -> None:
    """Raises FlagError if a plan for one chip would become a job for another."""
    if values.hardware in kubernetes.SLICES and values["tpu"].present and values.tpu != values.hardware:
        raise FlagError(f"--tpu={values.tpu} and --hardware={values.hardware}: a plan has one chip, give one")


def body(values: flags.FlagValues) -> int:
    if values.emit and not values.trace:
        if not values.config:
            raise FlagError("--emit needs a plan: --config=plan.toml, or --trace and the rest to make one")
        settings = replace(settings_of_file(values.config), platform=values.platform)
        emit(values, settings, values.config, values.tpu)
        return 0
    return answer(values)


def answer(values: flags.FlagValues) -> int:
    began = time.perf_counter()
    plan_flags = [name for name in ("output", "emit") if getattr(values, name)]
    if values.quick and plan_flags:
        raise FlagError(f"--quick computes bounds and makes no plan for --{plan_flags[0]}: leave out one of the two")
    check_chip(values)
    problem, builder = question(values)
    search_space = space(values, builder)
    console = Console()
    if values.quick:
        return quick(values, problem, search_space, console)
    with progress() as bar:
        search = SearchRun(problem, seeds=values.seeds, most=values.most, on_progress=progress_callback(bar))
        found = search.over(search_space)
        recommendation = recommend(problem, found, search.tolerance)
        others = variations_of(problem, builder, recommendation) if values.sensitivity else {}
        rows, extra = vary(found, recommendation.winner, search_space, others, search)
    usd = values.usd_per_hour or (
        hardware(values.hardware).price_per_hour if isinstance(builder, CandidateBuilder) else 0.0
    )
    console.print(tables.shortlist(problem, found, usd, values.rate), highlight=False)
    lines = [*recommendation.lines, *asked(values, problem, recommendation), *length_limit(values, problem)]
    for line in [
        *lines,
        *placed(recommendation.winner.candidate),
        *tables.counted(found.counts),
    ]:
        console.print(line, highlight=False, soft_wrap=True)
    if rows:
        console.print(tables.varied(rows), highlight=False)
    took_s, runs = time.perf_counter() - began, found.counts.runs + extra.runs
    console.print(f"{runs} simulations in {took_s:.1f} s", highlight=False)
    lines += placed(recommendation.winner.candidate)
    settings = settings_of(recommendation.winner.candidate, builder.build(recommendation.winner.candidate))
    if values.output:
        write(values, settings, lines)
        console.print(f"python -m jdisagg.launch --config={values.output}", highlight=False, soft_wrap=True)
    if values.emit:
        is_tpu = values.hardware in kubernetes.SLICES and isinstance(builder, CandidateBuilder)
        chip = values.hardware if is_tpu else values.tpu
        platform = "tpu" if is_tpu and values.platform == "auto" else values.platform
        source = values.output or "a plan just made"
        emit(values, Settings(**named(values), **settings, platform=platform), source, chip)
    console.print(f"--mesh={recommendation.winner.candidate.mesh}", highlight=False, soft_wrap=True)
    return 0


def quick(values: flags.FlagValues, problem: Problem, search_space: CandidateSource, console: Console) -> int:
    feasible = SearchRun(problem).with_limits(search_space)
    console.print(tables.bounds(problem, feasible), highlight=False)
    if values.rate:
        factors = values.p_correction_factor, values.d_correction_factor
        found = estimates(problem, (each.candidate for each in feasible), values.rate, *factors)
        console.print(tables.replicas(found, values.rate), highlight=False)
    return 0


def variations_of(
    problem: Problem, builder: CandidateBuilder | ProfiledCandidateBuilder, recommendation: RecommendedPlan
) -> dict[str, Problem]:
    """Returns the variants of the problem. Half the link is tried only if disaggregation won, since a pair of pools
    that lost cannot gain by it."""
    found = {
        f"objectives x {factor:g}": replace(problem, objectives=problem.objectives.scaled(factor))
        for factor in (0.8, 1.25)
    }
    if recommendation.should_disaggregate:
        found["link / 2"] = replace(problem, build=builder.half_the_link().build)
    return found


def asked(values: flags.FlagValues, problem: Problem, recommendation: RecommendedPlan) -> list[str]:
    """Returns lines on --rate and on a fifth less and more; a plan carries rates up to its goodput."""
    if not values.rate:
        return []
    lines = [tables.room(headroom(problem, recommendation.winner, values.rate))]
    carried = total(problem, recommendation.winner)
    for factor in (0.8, 1.2):
        rate = factor * values.rate
        lines.append(f"at {rate:g} requests/s it {'holds' if rate <= carried else 'does not hold'}: {carried:.3g} go")
    return lines


def length_limit(values: flags.FlagValues, problem: Problem) -> list[str]:
    """Returns a line on the context length of the plan, which is that of the workload's longest request."""
    if values.cost.startswith("profile:"):
        return []
    left_out = f", of those up to --max_model_len={values.max_model_len}" if values.max_model_len else ""
    most = longest(problem.workload.lengths)
    return [f"max_model_len is {most}, the workload's longest request{left_out}: longer ones will be refused"]


def placed(candidate: PlanCandidate) -> list[str]:
    """Returns the workers of each fast domain, if the plan's pairs keep within such domains."""
    units = paired(candidate.mesh, candidate.domain_devices) if candidate.domain_devices else ()
    return [f"placement: {unit}" for unit in units]


def write(values: flags.FlagValues, settings: dict, lines: Sequence[str]) -> None:
    """Writes the plan. Raises ConfigError if the file cannot be written."""
    profiled = values.cost.startswith("profile:")
    what = values.cost if profiled else f"{values.model} on {values.devices} x {values.hardware}"
    asked_for = f"{what}: python -m jdisagg plan"
    try:
        Path(values.output).write_text(as_policy({**named(values), **settings}, [asked_for, *lines]), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--output={values.output}: {error.strerror}") from error


def named(values: flags.FlagValues) -> dict[str, str]:
    """Returns the model and its dtype, if the plan's workers need them as settings."""
    model = {"model": values.checkpoint} if values.checkpoint else {}
    is_settable = values.dtype in LAUNCH_DTYPES and not values.cost.startswith("profile:")
    return {**model, **({"dtype": values.dtype} if is_settable else {})}


def emit(values: flags.FlagValues, settings: Settings, source: str, chip: str) -> None:
    """Writes the job of `settings`, which came from `source`, and prints the files. Raises ConfigError."""
    note = f"Made from {source} by `python -m jdisagg plan --emit`: change what it is made of, not this file."
    job_values = values.job_name, values.image, values.devices_per_host, chip
    job = JobValues(settings, *job_values, note, values.routers, values.fronts, values.namespace)
    found = files(job, values.emit)
    for line in idle_chips(job, values.emit):
        print(line)
    for path in write_files(values.job_folder, found):
        print(f"wrote {path}")


def progress() -> Progress:
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    console = Console(stderr=True)
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


def progress_callback(bar: Progress):
    """Returns the function that moves one bar from stage to stage."""
    task = bar.add_task("bounds", total=1)

    def on_progress(stage: str, done: int, most: int) -> None:
        bar.update(task, description=stage, completed=done, total=most)

    return on_progress


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command. Returns 0, or 2 with one line on the error."""
    return command.run("jdisagg plan", __doc__, declare(), argv, body)


if __name__ == "__main__":
    sys.exit(main())
