"""A dialect: z-lab's configuration with a key of its own, and another name of one tensor."""

from dflash_trt.checkpoint.dialects import zlab
from dflash_trt.checkpoint.dialects.dialect import Dialect, renamed


def canonical(weights, spec=None):
    return renamed(weights, lambda name: "fc.weight" if name == "fuse.weight" else name)


def read(config, weights):
    config.text("my_team_release")  # a key that nothing reads is refused
    return zlab.read(config, canonical(weights))


MY_TEAM = Dialect(
    name="my-team",
    recognises=lambda config: "my_team_release" in config,
    read=read,
    canonical=canonical,
    is_canonical=False,
)
