# SPDX-License-Identifier: Apache-2.0
"""Quantisation recipes: YAML files that say which linear layer gets which algorithm."""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from collections.abc import Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec

from dflash_trt.checkpoint.number_formats import FORMATS, FP8, INT4, NVFP4, W4A16_NVFP4
from dflash_trt.errors import RecipeError, shown
from dflash_trt.files.read import is_file
from dflash_trt.files.strict_yaml import closest, load_yaml

LAYER = re.compile(r"^layers\.\d+\.")
FP8_KV = "+fp8-kv"
"""Suffix of a recipe's name that adds an FP8 context cache."""
RECIPES = {FP8: "fp8", NVFP4: "nvfp4", W4A16_NVFP4: "nvfp4-w4a16", INT4: "int4-w4a16"}
"""The recipe that quantises every layer in a format, by modelopt's name of the format, which is accepted for it."""


if TYPE_CHECKING:
    Algorithm = str
else:
    Algorithm = Literal[(*FORMATS, "none")]


class Rule(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One line of a recipe."""

    modules: str
    """fnmatch pattern on names of linear layers; `*` crosses dots."""
    algorithm: Algorithm


class Recipe(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A recipe's YAML file, and the name by which the user gave it."""

    description: str
    rules: tuple[Rule, ...]
    """In order: the first rule that matches a module decides."""
    fp8_kv_cache: bool = False
    """Whether the checkpoint gets scales for an FP8 context cache."""
    name: str = ""
    """Name by which the user gave it; not a key of the file."""

    def algorithms(self, modules: list[str]) -> dict[str, str]:
        """Algorithm by quantised module; raises RecipeError if no rule matches a module, or a rule applies to none."""
        deciding = {module: self._deciding_rule(module) for module in modules}
        for number, rule in enumerate(self.rules, start=1):
            if not any(rule is decided for decided in deciding.values()):
                is_late = any(fnmatchcase(module, rule.modules) for module in modules)
                none = f"matches no module{closest(rule.modules, modules, 'module')}"
                decides = "matches only modules that earlier rules take" if is_late else none
                raise RecipeError(f"recipe {self.name}: rule {number} ({rule.modules}) {decides}")
        return {m: rule.algorithm for m, rule in deciding.items() if rule.algorithm != "none"}

    @property
    def needs_ranges(self) -> bool:
        """Whether activations or the context cache are quantised."""
        algorithms = {rule.algorithm for rule in self.rules} - {"none"}
        return self.fp8_kv_cache or any(FORMATS[algorithm].quantises_input for algorithm in algorithms)

    def _deciding_rule(self, module: str) -> Rule:
        for rule in self.rules:
            if fnmatchcase(module, rule.modules):
                return rule
        patterns = ", ".join(rule.modules for rule in self.rules)
        raise RecipeError(
            f"recipe {self.name}: no rule matches module {module!r} (rules: {patterns})",
            hint=f"add a last rule for the rest: {{modules: {module}, algorithm: none}}",
        )


def recipe_text(description: str, algorithms: Mapping[str, str], modules: list[str], *, fp8_kv_cache: bool) -> str:
    """The YAML file that gives each of `modules` its algorithm, or none: a rule for each kind, exceptions before it."""
    kinds: dict[str, list[str]] = defaultdict(list)
    for module in modules:
        kinds[LAYER.sub("layers.*.", module)].append(module)
    lines = [f"description: {json.dumps(description)}", "rules:"]
    for kind, members in kinds.items():
        chosen = {module: algorithms.get(module, "none") for module in members}
        most = Counter(chosen.values()).most_common(1)[0][0]
        exceptions = [(module, algorithm) for module, algorithm in chosen.items() if algorithm != most]
        for pattern, algorithm in [*exceptions, (kind, most)]:
            lines += [f'  - modules: "{pattern}"', f"    algorithm: {algorithm}"]
    lines += ["fp8_kv_cache: true"] if fp8_kv_cache else []
    return "".join(f"{line}\n" for line in lines)


def recipe_directory() -> Path:
    """Directory of the recipes: in the installed package, or next to it in a checkout."""
    package = Path(__file__).parents[1]
    installed = package / "build_configs" / "recipes"
    return installed if installed.is_dir() else package.parent / "build_configs" / "recipes"


def recipe_names() -> list[str]:
    """The recipes that come with the package, sorted."""
    return sorted(path.stem for path in recipe_directory().glob("*.yaml"))


def load_recipe(name_or_path: str) -> Recipe:
    """A recipe by name, or from a YAML file, with `+fp8-kv` or without; raises RecipeError if it is missing.

    modelopt's name of a format, in any case, is the recipe of that format, and its name is the recipe's.
    """
    given = name_or_path.removesuffix(FP8_KV)
    base = given if is_file(given) else RECIPES.get(given.upper(), given)
    name = base + name_or_path[len(given) :]
    path = recipe_directory() / f"{base}.yaml"
    if base not in recipe_names():
        path = Path(base)
        if not is_file(base):
            raise RecipeError(
                f"{shown(base)}: expected a recipe ({', '.join(recipe_names())}), each with or without {FP8_KV},"
                f" or a YAML file, found neither{closest(base, recipe_names(), 'recipe')}"
            )
    loaded = load_yaml(path, Recipe, RecipeError)
    if loaded.name:
        raise RecipeError(f"{path}: remove the key name ({shown(loaded.name)}): a recipe is named after its file")
    has_fp8_cache = loaded.fp8_kv_cache or name.endswith(FP8_KV)
    return msgspec.structs.replace(loaded, name=name, fp8_kv_cache=has_fp8_cache)
