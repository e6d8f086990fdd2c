"""`coalign launch TARGET CONFIG`: a run as a job of Ray, Kubernetes, Slurm, SkyPilot or torchrun; `coalign sweep`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    help="Start a run as a job: on a Ray cluster, Kubernetes, Slurm, the machines of a cloud, or by torchrun.\n\n"
    "With `--dry-run` each target prints what it would submit, and starts nothing.",
)
Config = Annotated[Path, typer.Argument(help="The run's YAML file.")]
Overrides = Annotated[list[str] | None, typer.Argument(help="Settings that replace those of the file.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print what would be submitted, and start nothing.")]
Nodes = Annotated[int | None, typer.Option(min=1, help="Nodes; without it as few as hold the run.")]
Devices = Annotated[
    int | None, typer.Option("--gpus-per-node", min=0, help="GPUs of each node; needed if `num_gpu` is auto.")
]
Interface = Annotated[str | None, typer.Option(help="The network between the nodes, such as `ib0`.")]


@app.command(name="ray")
def launch_ray(
    config: Config,
    overrides: Overrides = None,
    address: Annotated[
        str | None, typer.Option(help="Ray's dashboard; without it RAY_API_SERVER_ADDRESS, or http://127.0.0.1:8265.")
    ] = None,
    token_file: Annotated[Path | None, typer.Option(help="The file with Ray's token.")] = None,
    interface: Interface = None,
    dry_run: DryRun = False,
):
    """Submit a job to a Ray cluster that is running, show its log, and end with its exit code."""
    from coalign_jobs.job import plan_job
    from coalign_jobs.ray import ADDRESS, RayOptions, render_submission, submit_job

    # How large the cluster is, is known there, and checked before the run reserves anything.
    job = plan_job(config, overrides or [], sized=False, ships=True)
    options = RayOptions(address or os.environ.get("RAY_API_SERVER_ADDRESS") or ADDRESS, token_file, interface)
    if dry_run:
        return typer.echo(render_submission(job, options), nl=False)
    raise typer.Exit(submit_job(job, options))


@app.command(name="kuberay")
def launch_kuberay(
    config: Config,
    overrides: Overrides = None,
    image: Annotated[str, typer.Option(help="The image of all pods, made by docker/*.Dockerfile.")] = "coalign:cuda",
    volume: Annotated[str, typer.Option(help="Claim and path of the volume for run folders.")] = "coalign-runs:/runs",
    nodes: Nodes = None,
    gpus_per_node: Devices = None,
    cores: Annotated[str, typer.Option(help="Cores of each pod.")] = "8",
    memory: Annotated[str, typer.Option(help="Memory of each pod.")] = "64Gi",
    shm: Annotated[str, typer.Option(help="How much of it /dev/shm may take.")] = "16Gi",
    secret: Annotated[list[str] | None, typer.Option(help="A secret whose keys become variables; repeatable.")] = None,
    namespace: Annotated[str | None, typer.Option(help="The namespace; without it kubectl's.")] = None,
    interface: Annotated[str, typer.Option(help="The network of the pods.")] = "eth0",
    retries: Annotated[int, typer.Option(min=0, help="How often a job that failed starts again.")] = 3,
    dry_run: DryRun = False,
):
    """Apply a RayJob: KubeRay raises a Ray cluster of pods, trains, and removes it."""
    from coalign_jobs.job import plan_job
    from coalign_jobs.kuberay import KubeRayOptions, apply_rayjob, render_rayjob

    job = plan_job(config, overrides or [], nodes=nodes, devices=gpus_per_node, ships=True)
    claim, _, path = volume.partition(":")
    options = KubeRayOptions(
        image, (claim, path), namespace, cores, memory, shm, tuple(secret or ()), interface, retries
    )
    manifest = render_rayjob(job, options)
    typer.echo(manifest if dry_run else apply_rayjob(job, manifest), nl=not dry_run)


@app.command(name="slurm")
def launch_slurm(
    config: Config,
    overrides: Overrides = None,
    partition: Annotated[str | None, typer.Option("--partition", "-p", help="The partition.")] = None,
    account: Annotated[str | None, typer.Option("--account", "-A", help="The account that pays.")] = None,
    time: Annotated[str | None, typer.Option("--time", "-t", help="The limit of an attempt, such as 4:00:00.")] = None,
    nodes: Nodes = None,
    gpus_per_node: Devices = None,
    gpu: Annotated[str | None, typer.Option(help="The kind of GPU, as the cluster calls it.")] = None,
    cores: Annotated[int | None, typer.Option(min=1, help="Cores of each node; without it whole nodes.")] = None,
    notice: Annotated[int, typer.Option(min=1, help="Seconds for the checkpoint before an attempt ends.")] = 120,
    interface: Interface = None,
    option: Annotated[
        list[str] | None, typer.Option("--option", "-o", help="A further line of #SBATCH; repeatable.")
    ] = None,
    dry_run: DryRun = False,
):
    """Submit an sbatch script that raises Ray on its nodes, trains, and comes back after preemption."""
    from coalign_jobs.job import plan_job
    from coalign_jobs.slurm import SlurmOptions, render_sbatch, submit_sbatch

    job = plan_job(config, overrides or [], nodes=nodes, devices=gpus_per_node, ships=False)
    options = SlurmOptions(partition, account, time, cores, gpu, interface, notice, tuple(option or ()))
    script = render_sbatch(job, options)
    typer.echo(script if dry_run else submit_sbatch(job, script), nl=not dry_run)


@app.command(name="skypilot")
def launch_skypilot(
    config: Config,
    overrides: Overrides = None,
    gpu: Annotated[str | None, typer.Option(help="The kind of GPU, as SkyPilot calls it: `H100`.")] = None,
    nodes: Nodes = None,
    gpus_per_node: Devices = None,
    cloud: Annotated[str | None, typer.Option(help="The cloud; without it the cheapest that has the machines.")] = None,
    cores: Annotated[str | None, typer.Option(help="Cores of each machine: `16`, or `16+`.")] = None,
    image: Annotated[str | None, typer.Option(help="A Docker image; without it that of the cloud.")] = None,
    bucket: Annotated[str | None, typer.Option(help="A bucket for run folders: `s3://my-runs`.")] = None,
    spot: Annotated[bool, typer.Option("--spot", help="Machines that can be taken away.")] = False,
    interface: Interface = None,
    setup: Annotated[
        str, typer.Option(help="How Coalign is installed on a machine.")
    ] = "pip install 'coalign[ray,math,vllm,plots]'",
    dry_run: DryRun = False,
):
    """Start a managed job of SkyPilot: it finds machines, copies the code, and restarts what was taken away."""
    from coalign_jobs.job import plan_job
    from coalign_jobs.skypilot import SkyPilotOptions, launch_task, render_task

    job = plan_job(config, overrides or [], nodes=nodes, devices=gpus_per_node, ships=True)
    task = render_task(job, SkyPilotOptions(gpu, cloud, cores, image, bucket, spot, interface, setup))
    if dry_run:
        return typer.echo(task, nl=False)
    raise typer.Exit(launch_task(job, task))


@app.command(name="torchrun")
def launch_torchrun(
    config: Config,
    overrides: Overrides = None,
    nodes: Nodes = None,
    gpus_per_node: Devices = None,
    node_rank: Annotated[int, typer.Option(min=0, help="The number of this machine, from 0.")] = 0,
    address: Annotated[str | None, typer.Option(help="HOST or HOST:PORT of the first machine.")] = None,
    interface: Interface = None,
    dry_run: DryRun = False,
):
    """Train on data without Ray (sft, dpo, reward_model, …): torchrun's processes are the ranks of the model."""
    from coalign_jobs.job import plan_job
    from coalign_jobs.torchrun import TorchrunOptions, render_torchrun, run_torchrun

    job = plan_job(config, overrides or [], nodes=nodes or 1, devices=gpus_per_node, stacked=True, ships=False)
    options = TorchrunOptions(node_rank, address, interface)
    if dry_run:
        return typer.echo(render_torchrun(job, options), nl=False)
    run_torchrun(job, options)


def sweep(
    file: Annotated[Path, typer.Argument(help="The sweep's YAML file: a base, a space, a metric.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="Settings that replace those of the file: `concurrent=2 seed=1`.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with a sweep that was interrupted.")] = False,
    quiet: Annotated[bool, typer.Option(help="The table and the best trial only.")] = False,
):
    """Run a configuration with other settings, trial by trial, and name the best. Ctrl-C stops with checkpoints."""
    from coalign.config import load_section
    from coalign.report.display import Display
    from coalign_jobs.sweep.config import SweepConfig

    config = load_section(SweepConfig, file, overrides or ())
    from coalign_jobs.sweep.sweep import run_sweep

    raise typer.Exit(run_sweep(config, Display(quiet=quiet), resume=resume))
