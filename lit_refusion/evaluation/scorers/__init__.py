"""The scorers, by the name under which a config builds them."""

from lit_refusion.evaluation.scorers.choice import Choice
from lit_refusion.evaluation.scorers.exact import Exact
from lit_refusion.evaluation.scorers.math_verify import MathVerify
from lit_refusion.evaluation.scorers.numeric import Numeric
from lit_refusion.evaluation.scorers.unit_tests import UnitTests

__all__ = ["Choice", "Exact", "MathVerify", "Numeric", "UnitTests"]
