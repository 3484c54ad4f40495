# SPDX-License-Identifier: Apache-2.0
"""Whether a peer that registers fits its run; what does not is named."""

from __future__ import annotations

from collections.abc import Mapping, Set

from megatron_ext.errors import UserError
from megatron_ext.outer.codecs.all_codecs import CODECS, build_codec
from megatron_ext.outer.places import place_problems
from megatron_ext.sync_service.protocol.catalog import LONGEST_NAME, Catalog
from megatron_ext.sync_service.protocol.refusal import Refusal
from megatron_ext.sync_service.protocol.report import CODEC_PACKAGE, INTERVAL
from megatron_ext.sync_service.rounds.config import RunConfig
from megatron_ext.sync_service.values.merge import layers_of

__all__ = ["check_against", "check_alone"]

_MOST_FIELDS = 1000
_LONGEST_VALUE = 10_000


def check_alone(run: RunConfig, config: Mapping[str, str], catalog: Catalog) -> None:
    """Check what a peer brings by itself.

    Args:
        run: the run.
        config: what must be the same for all peers, by the field's name.
        catalog: the tensors.

    Raises:
        Refusal: the codec is unknown here, or of another package than at the peer, an owner is none of the peers, the
            steps between two rounds are not the run's, there are no experts to merge, the tensors are beyond the run's
            limits, or a field has no end.
    """
    _check_fields(config)
    run.limits.check_catalog(catalog)
    _check_codec(run, config.get("codec", ""), config.get(CODEC_PACKAGE, ""))
    for spec in catalog:
        if spec.owners and spec.owners[-1] >= run.peers:
            raise Refusal(
                "invalid", f"tensor {spec.name!r} has the owner {spec.owners[-1]}; there are {run.peers} peers"
            )
    steps = config.get(INTERVAL)
    if run.sync_steps is not None and steps not in (None, str(run.sync_steps)):
        raise Refusal("state", f"{INTERVAL} is {steps} at the peer, and sync_steps {run.sync_steps} in the run")
    if run.merging is not None:
        try:
            layers = layers_of(catalog)
        except UserError as error:
            raise Refusal("invalid", f"merge_interval is {run.merge_interval} in the run: {error}") from error
        if not layers:
            raise Refusal(
                "invalid",
                f"merge_interval is {run.merge_interval} in the run, but the catalog has no experts (tensors such as "
                "decoder.layers.0.mlp.experts.0.linear_fc1.weight); drop merge_interval",
            )


def _check_codec(run: RunConfig, name: str, package: str) -> None:
    """Check that this server has a peer's codec, and the same one.

    Raises:
        Refusal: it does not, or the codec does not work in the rounds of the run.
    """
    try:
        kind = build_codec(name).name.partition(":")[0]
        problems = place_problems("codec", CODECS, kind, run.place)
    except UserError as error:
        raise Refusal("invalid", f"at the server, {error}, or install there what the peer has") from error
    if problems:
        raise Refusal("invalid", problems[0])
    own = CODECS.package_of(kind) or ""
    if own != package:
        raise Refusal(
            "state",
            f"codec {name!r} comes from {package or 'megatron_ext'} at the peer and from {own or 'megatron_ext'} at "
            "the server; install the same in both places",
        )


def check_against(
    agreed: Mapping[str, str],
    known: Catalog,
    peer: str,
    config: Mapping[str, str],
    catalog: Catalog,
    own: Set[str] = frozenset(),
) -> None:
    """Check that a peer brings what the run's first one did.

    Args:
        agreed: fields of the run.
        known: tensors of the run.
        peer: who registers.
        config: its fields.
        catalog: its tensors.
        own: fields that may differ.

    Raises:
        Refusal: something differs.
    """
    for field in sorted((agreed.keys() | config.keys()) - own):
        wanted, found = agreed.get(field), config.get(field)
        if wanted != found:
            raise Refusal(
                "state",
                f"config field {field!r} is {found!r} at peer {peer!r} and {wanted!r} in the run, which its first peer "
                "has said; give the same, or begin a run under another name",
            )
    difference = known.difference(catalog)
    if difference is not None:
        raise Refusal(
            "state",
            f"the catalog of peer {peer!r} is not the run's: {difference}; give the same model, or begin a run under "
            "another name",
        )


def _check_fields(config: Mapping[str, str]) -> None:
    """Check that what all peers have in common is no more than settings: the journal keeps it.

    Raises:
        Refusal: it is.
    """
    if len(config) > _MOST_FIELDS:
        raise Refusal("invalid", f"config has {len(config)} fields; at most {_MOST_FIELDS} are possible")
    for field, value in config.items():
        if not field or len(field) > LONGEST_NAME or not field.isprintable():
            raise Refusal(
                "invalid",
                f"config has a field {field[:100]!r}; its name must be 1 to {LONGEST_NAME} letters that can be printed",
            )
        if len(value) > _LONGEST_VALUE:
            raise Refusal(
                "invalid", f"config field {field!r} has {len(value)} letters; at most {_LONGEST_VALUE} are possible"
            )
