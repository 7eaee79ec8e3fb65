"""A plan in a trainer's own options, read back before it is handed out."""

from dataclasses import fields

from pptune.errors import PlanError
from pptune.model import ModelSpec
from pptune.plan import Plan, check_plan
from pptune.targets.legality import illegal
from pptune.targets.target import ExportedFile, Job, Setting, Target, Written
from pptune.targets.trainers import TRAINERS


def export(
    plan: Plan,
    target: Target,
    *,
    model: ModelSpec,
    dtype: str,
    seq_len: int,
    profile_name: str = "a profile",
    tensor_parallel: int = 1,
    context_parallel: int = 1,
    zero: int = 0,
    allow_empty_stages: bool = False,
) -> list[ExportedFile]:
    """`plan` in the target's own options, read back and compared before it is returned.

    Raises PlanError where the target cannot run the plan or cannot be told all of it.
    """
    check_plan(plan, allow_empty_stages=allow_empty_stages)
    if plan.num_layers != model.num_layers:
        raise PlanError(
            f"the plan places {plan.num_layers} layers, but model {model.name} has "
            f"{model.num_layers}; search again for this model"
        )
    setting = Setting(
        model=model,
        tensor_parallel=tensor_parallel,
        context_parallel=context_parallel,
        zero=zero,
        allow_empty_stages=allow_empty_stages,
    )
    violation = illegal(
        plan,
        target,
        model=model,
        tensor_parallel=tensor_parallel,
        context_parallel=context_parallel,
        zero=zero,
        allow_empty_stages=allow_empty_stages,
    )
    if violation is not None:
        raise PlanError(f"{plan.label} cannot be exported to {target}: {violation}")
    job = Job(model=model, dtype=dtype, seq_len=seq_len, profile_name=profile_name, setting=setting)
    files = TRAINERS[target.name].write(plan, job, target.version)
    check_written(plan, reread(files, target, num_layers=model.num_layers))
    return files


def reread(files: list[ExportedFile], target: Target, *, num_layers: int) -> Written:
    """What the files say to a model of `num_layers` blocks, read as the target reads them."""
    texts = {file.name: file.text for file in files}
    return TRAINERS[target.name].reread(texts, num_layers)


def check_written(plan: Plan, written: Written) -> None:
    """Raise PlanError where `written` says anything else than `plan`."""
    for field in fields(written):
        value = getattr(written, field.name)
        wanted = getattr(plan, field.name)
        if value is not None and value != wanted:
            raise PlanError(
                f"the exported text gives {field.name} {value}, but the plan has {wanted}; "
                "please report this plan"
            )
