"""A module of transformers without any cast to fp32 but that of the rotation angles: `torch.float64` for `torch.float32`,
`.double()` for `.float()`. Angles are the cosines and sines of the other models everywhere: those of `torch.polar` are not always the same
in fp32."""

import importlib.util
import pathlib
import re
import sys


def without_casts(module):
    """The module from its changed source."""
    source = pathlib.Path(module.__file__).read_text()
    before, angles, after = re.split(r"(?ms)(^class \w+RotaryEmbedding.*?)(?=^class |^def )", source)
    before, after = (re.sub(r"\btorch\.float(32)?\b", "torch.float64", part).replace(".float()", ".double()") for part in (before, after))
    angles = angles.replace("torch.polar(torch.ones_like(freqs), freqs)", "torch.complex(freqs.cos(), freqs.sin())")
    source = before + angles + after
    spec = importlib.util.spec_from_loader(module.__name__ + "_fp64", loader=None)
    changed = importlib.util.module_from_spec(spec)
    changed.__package__, changed.__file__ = module.__package__, module.__file__
    sys.modules[spec.name] = changed
    exec(compile(source, spec.name, "exec"), changed.__dict__)
    return changed
