"""The base of every section of a recipe.

Invariants: unknown keys are refused (a misspelt key that is ignored costs a run); a section never changes
after it was read; defaults are those of NeMo RL's base recipe unless the field says why not.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Positive = Annotated[int, Field(gt=0)]
NotNegative = Annotated[int, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
PositiveFloat = Annotated[float, Field(gt=0.0, allow_inf_nan=False)]
NotNegativeFloat = Annotated[float, Field(ge=0.0, allow_inf_nan=False)]


class Section(BaseModel):
    """One mapping of a recipe."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        use_attribute_docstrings=True,
        serialize_by_alias=True,
        protected_namespaces=(),
    )
