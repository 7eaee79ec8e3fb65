"""The parts that a training script for torch is put together from."""

IMPORTS = (
    ("argparse", "import argparse"),
    ("os", "import os"),
    ("tempfile", "import tempfile"),
    ("dataclass", "from dataclasses import dataclass"),
    ("import_module", "from importlib import import_module"),
    ("Path", "from pathlib import Path"),
    ("", ""),
    ("torch", "import torch"),
    ("dist", "import torch.distributed as dist"),
    ("nn", "from torch import nn"),
    ("init_device_mesh", "from torch.distributed.device_mesh import init_device_mesh"),
    ("ZeroRedundancyOptimizer", "from torch.distributed.optim import ZeroRedundancyOptimizer"),
    ("PipelineStage", "from torch.distributed.pipelining import PipelineStage, schedules"),
    ("functional", "from torch.nn import functional"),
    ("checkpoint", "from torch.utils.checkpoint import checkpoint"),
)
"""What the parts of the script may use, and the line that imports it."""

BUILT_IN_MAKERS = '''

def make_embedding() -> nn.Module:
    return <Family>Embedding(SIZES)


def make_block(index: int) -> nn.Module:
    return <Family>Block(SIZES)


def make_head() -> nn.Module:
    return <Family>Head(SIZES)


def example_batch(size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids [size, seq] and the ids that follow them."""
    ids = torch.randint(VOCAB_SIZE, (size, SEQ_LEN + 1))
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def loss_fn(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
'''

TRAINING = '''

class Stage(nn.Module):
    """Consecutive layers: what one pipeline stage computes."""

    def __init__(self, stage: int) -> None:
        super().__init__()
        first_block = sum(LAYERS_PER_STAGE[:stage])
        is_last = stage == len(LAYERS_PER_STAGE) - 1
        self.embedding = seeded(0, make_embedding) if stage == 0 else None
        self.blocks = nn.ModuleList(
            seeded(1 + index, lambda index=index: make_block(index))
            for index in range(first_block, first_block + LAYERS_PER_STAGE[stage])
        )
        self.head = seeded(1 + sum(LAYERS_PER_STAGE), make_head) if is_last else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.embedding is not None:
            x = self.embedding(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if RECOMPUTE else block(x)
        return x if self.head is None else self.head(x)


def seeded(seed: int, make) -> nn.Module:
    """A layer that is the same in every replica and whichever stage holds it."""
    torch.manual_seed(seed)
    return make()


def build_schedule(stages: list[PipelineStage]):
    <schedule>


'''

LOADED = '''order = """\\
{order}"""
    runtime = schedules._PipelineScheduleRuntime(stages, NUM_MICROBATCHES, loss_fn=loss_fn)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "order.csv"
        path.write_text(order)
        runtime._load_csv(str(path))
    return runtime'''

PLAIN_OPTIMIZER = """\
def build_optimizer(parameters: list[nn.Parameter], data_group, learning_rate: float):
    return torch.optim.AdamW(parameters, lr=learning_rate)
"""

ZERO_OPTIMIZER = """\
def build_optimizer(parameters: list[nn.Parameter], data_group, learning_rate: float):
    return ZeroRedundancyOptimizer(
        parameters, torch.optim.AdamW, process_group=data_group, lr=learning_rate
    )
"""

USER_LAYERS = """

torch.manual_seed(0)
user = import_module("<module>").<function>()
if isinstance(user, (list, tuple, nn.Sequential, nn.ModuleList)):
    user_embedding, *user_blocks, user_head = user
else:
    user_embedding, user_blocks, user_head = user.embedding, list(user.blocks), user.head


def make_embedding() -> nn.Module:
    return user_embedding


def make_block(index: int) -> nn.Module:
    return user_blocks[index]


def make_head() -> nn.Module:
    return user_head


def example_batch(size: int) -> tuple[torch.Tensor, torch.Tensor]:
    if hasattr(user, "example_batch"):
        inputs, targets = user.example_batch(size)
        return inputs.to(DTYPE) if inputs.is_floating_point() else inputs, targets
    ids = torch.randint(VOCAB_SIZE, (size, SEQ_LEN + 1))
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def loss_fn(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    if hasattr(user, "loss"):
        return user.loss(output, targets)
    return functional.cross_entropy(output.flatten(0, 1).float(), targets.flatten())
"""

MAIN = """

def average_over_replicas(parameters: list[nn.Parameter], data_group) -> None:
    for parameter in parameters:
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad, group=data_group)
            parameter.grad /= DATA_PARALLEL


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--learning-rate", type=float, default=3e-4)
    options = parser.parse_args()

    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo", device_id=device if on_gpu else None)
    if dist.get_world_size() != DATA_PARALLEL * NUM_RANKS:
        raise SystemExit(
            f"the plan needs {DATA_PARALLEL * NUM_RANKS} processes, got {dist.get_world_size()}"
        )
    mesh = init_device_mesh(
        device.type, (DATA_PARALLEL, NUM_RANKS), mesh_dim_names=("data", "pipeline")
    )
    replica, rank = mesh.get_local_rank("data"), mesh.get_local_rank("pipeline")
    num_stages = len(LAYERS_PER_STAGE)
    own = STAGES_OF_RANK[rank]
    stages = [
        PipelineStage(
            Stage(stage).to(device, DTYPE), stage, num_stages, device,
            group=mesh.get_group("pipeline"),
        )
        for stage in own
    ]
    schedule = build_schedule(stages)
    parameters = [parameter for stage in stages for parameter in stage.submod.parameters()]
    optimizer = None  # a rank whose only stage is empty has nothing to optimize
    if parameters:
        optimizer = build_optimizer(parameters, mesh.get_group("data"), options.learning_rate)

    torch.manual_seed(replica)
    inputs, targets = example_batch(MICROBATCH_SIZE * NUM_MICROBATCHES)
    inputs, targets = inputs.to(device), targets.to(device)
    for step in range(options.steps):
        losses: list[torch.Tensor] = []
        schedule.step(
            *((inputs,) if 0 in own else ()),
            target=targets if num_stages - 1 in own else None,
            losses=losses,
            return_outputs=False,
        )
        if DATA_PARALLEL > 1:
            average_over_replicas(parameters, mesh.get_group("data"))
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad()
        if losses and replica == 0:
            print(f"step {step} loss {torch.stack(losses).mean().item():.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
"""
