"""How to start pptune's commands on many nodes."""

from pptune.errors import UsageError

_SLURM = """\
#!/bin/bash
# One task per GPU; pptune starts its ranks as children of these tasks.
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export MASTER_PORT=29400
srun pptune profile {model} -o profile.json
# On the login node, no GPU needed:
#   pptune search profile.json --global-batch-size 256
srun pptune validate plans.json
"""

_TORCHRUN = """\
# On every node, with NODE_RANK 0, 1, ... and the first node's address:
torchrun --nnodes 2 --nproc-per-node 8 --node-rank $NODE_RANK \\
    --rdzv-backend c10d --rdzv-endpoint $MASTER_ADDR:29400 \\
    -m pptune profile {model} -o profile.json
# On one machine, no GPU needed:
#   pptune search profile.json --global-batch-size 256
torchrun --nnodes 2 --nproc-per-node 8 --node-rank $NODE_RANK \\
    --rdzv-backend c10d --rdzv-endpoint $MASTER_ADDR:29400 \\
    -m pptune validate plans.json
"""


def launch_lines(launcher: str, model: str) -> str:
    """The script for `slurm` or `torchrun`. Raises UsageError for another launcher."""
    match launcher:
        case "slurm":
            return _SLURM.format(model=model)
        case "torchrun":
            return _TORCHRUN.format(model=model)
    raise UsageError(f"--print-launch {launcher!r} is unknown; use slurm or torchrun")
