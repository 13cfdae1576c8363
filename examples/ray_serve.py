"""An OpenAI server of several replicas, each an engine that speculates with trees, on Ray Serve.

$ pip install '.[gpu,ray]'    # in a clone; not ray[llm], which replaces vLLM by the one it pins
$ python examples/ray_serve.py --model meta-llama/Llama-3.1-70B-Instruct \
      --draft-model meta-llama/Llama-3.2-1B-Instruct --tensor-parallel-size 4 --max-replicas 4

It serves on the Ray cluster that RAY_ADDRESS names (see cluster.md), or else on one that it
starts on this machine, until Ctrl-C.
"""

import json
import logging
import signal
from typing import Annotated, Any

import ray
import typer
from ray import serve
from ray.serve.llm import LLMConfig, build_openai_app
from ray_batch import Device, TreeOption, cpu_environment, speculative_config


def placement(device: Device, cpus: int, tensor_parallel_size: int) -> dict[str, Any]:
    """Keys of the `LLMConfig` that say what a replica takes of its node."""
    if device is Device.GPU:  # a GPU for each rank is Ray's default
        return {"accelerator_config": {"kind": "gpu"}}
    return {
        "accelerator_config": {"kind": "cpu"},
        "placement_group_config": {
            "bundles": [{"CPU": cpus * tensor_parallel_size}],
            "strategy": "STRICT_PACK",
        },
        "runtime_env": cpu_environment(threads=cpus),
    }


def main(
    model: Annotated[str, typer.Option(help="Target: name, or a path that all nodes have.")],
    draft_model: Annotated[str, typer.Option(help="Draft, likewise.")],
    tree: TreeOption = None,
    served_name: Annotated[
        str | None, typer.Option(help="Model name in requests; the target's if not given.")
    ] = None,
    tensor_parallel_size: Annotated[int, typer.Option(min=1, help="GPUs of each replica.")] = 1,
    min_replicas: Annotated[int, typer.Option(min=0, help="Kept even when idle.")] = 1,
    max_replicas: Annotated[int, typer.Option(min=1, help="At most, under load.")] = 2,
    target_ongoing_requests: Annotated[
        int, typer.Option(min=1, help="Requests per replica at which Serve adds another one.")
    ] = 16,
    accelerator_type: Annotated[
        str | None, typer.Option(help="Only nodes with this GPU, as Ray names it: H100, L40S.")
    ] = None,
    device: Annotated[Device, typer.Option(help="What engines run on.")] = Device.GPU,
    cpus_per_rank: Annotated[
        int, typer.Option(min=1, help="With --device cpu: cores (and threads) of each rank.")
    ] = 1,
    speculative_options: Annotated[
        str, typer.Option(help='More of Sequoia\'s keys, as a JSON object: {"adapt": false}.')
    ] = "{}",
    engine_options: Annotated[
        str, typer.Option(help="More of vLLM's engine arguments, as a JSON object.")
    ] = "{}",
    health_check_period: Annotated[
        float, typer.Option(min=0.1, help="Seconds; a dead engine is replaced after three.")
    ] = 2.0,
    host: str = "127.0.0.1",
    port: int = 8000,
) -> None:
    """Serve a model with Sequoia on a Ray cluster, until Ctrl-C."""
    config = LLMConfig(
        model_loading_config={"model_id": served_name or model, "model_source": model},
        accelerator_type=accelerator_type,
        deployment_config={
            "autoscaling_config": {
                "min_replicas": min_replicas,
                "max_replicas": max_replicas,
                "target_ongoing_requests": target_ongoing_requests,
            },
            # A replica whose engine died gets requests until three checks have failed.
            "health_check_period_s": health_check_period,
            # The work is done by the engine, which has processes of its own.
            "ray_actor_options": {"num_cpus": 0 if device is Device.CPU else 1},
        },
        engine_kwargs={
            "tensor_parallel_size": tensor_parallel_size,
            **json.loads(engine_options),
            "speculative_config": speculative_config(draft_model, tree, speculative_options),
        },
        **placement(device, cpus_per_rank, tensor_parallel_size),
    )
    ray.init(logging_level=logging.WARNING)
    # As Ctrl-C: ends the application. After ray.init, which handles SIGTERM by aborting.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    serve.start(http_options={"host": host, "port": port})
    # On CPUs all cores may be needed by replicas, and the router needs little.
    router = {"ray_actor_options": {"num_cpus": 0}} if device is Device.CPU else {}
    app = build_openai_app({"llm_configs": [config], "ingress_deployment_config": router})
    try:
        serve.run(app, blocking=True)
    except KeyboardInterrupt:
        typer.echo("stopping")
    finally:
        serve.shutdown()


if __name__ == "__main__":
    typer.run(main)
