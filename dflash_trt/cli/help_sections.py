# SPDX-License-Identifier: Apache-2.0
"""Help in sections: commands by what they are for, and the options of a command by what they set."""

from __future__ import annotations

import click

from dflash_trt.api.runtime_options import RuntimeOptions
from dflash_trt.api.sampling_params import SAMPLER_FIELDS

COMMANDS = {
    "Drafts": ("drafts", "inspect", "convert"),
    "Quantise": ("quantize", "search", "recover"),
    "Build and check": ("build", "capture", "verify"),
    "Run here": ("generate", "chat", "serve"),
    "Deploy": ("serve-config", "triton-repo", "dynamo"),
    "Plan": ("estimate", "tune"),
    "Measure and diagnose": ("try", "bench", "doctor"),
}
"""The rows of README's table of commands."""
OPTIONS = {
    "Options": (),
    "Sampling": (*SAMPLER_FIELDS, "max_tokens", "stop", "ignore_eos", "logprobs"),
    "Chat template": ("chat", "chat_template_kwargs", "no_thinking", "template", "thinking", "system"),
    "Runtime": (*RuntimeOptions.__struct_fields__, "num_ranks", "drain_seconds"),
    "HTTP": ("host", "port", "served_model_name", "api_key_file", "allow_origin", "allowed_host", "max_waiting",
             "max_body_mib", "max_answer_mib", "otlp_traces_endpoint", "request_timeout"),
    "Output and log": ("output", "force", "as_json", "dry_run", "plot", "html", "verbose", "quiet", "log_level",
                       "log_format", "help"),
}  # fmt: skip
"""Names of parameters, which mean the same in every command; the others come first."""


class SectionedGroup(click.Group):
    """A group whose help lists its commands in the sections of COMMANDS."""

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Writes the sections."""
        for title, names in COMMANDS.items():
            with formatter.section(title):
                formatter.write_dl([(name, self.commands[name].get_short_help_str(90)) for name in names])


def format_options(command: click.Command, ctx: click.Context, formatter: click.HelpFormatter) -> None:
    """Writes the options of `command` in the sections of OPTIONS; a section with one option joins the first."""
    options = [each for each in command.get_params(ctx) if isinstance(each, click.Option)]
    rows = {option.name: option.get_help_record(ctx) for option in options}
    sections = {title: [name for name in rows if name in names] for title, names in OPTIONS.items()}
    sections = {title: names for title, names in sections.items() if len(names) > 1}
    placed = {name for names in sections.values() for name in names}
    for title, names in {"Options": [name for name in rows if name not in placed], **sections}.items():
        if found := [row for name in names if (row := rows[name]) is not None]:
            with formatter.section(title):
                formatter.write_dl(found)
