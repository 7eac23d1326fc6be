"""Instances of declared kernels: a body, traced for each target, also for the parts of arrays that devices have."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, cast

import jax

from tilekern import _jax, source
from tilekern.errors import ArgumentError
from tilekern.ir.analysis.sharding import Place, sharding_of
from tilekern.ir.types import FOUR_BITS
from tilekern.kernel import derived_rules, stated_rules, tuned
from tilekern.kernel.body import Body, Proof, failed
from tilekern.kernel.choice import Tunable
from tilekern.kernel.definition import Definition, Options, TypedCall
from tilekern.kernel.instance import Derivatives, Instance, Tuning
from tilekern.kernel.primitive import Divisible, Elements, Types
from tilekern.kernel.results import Results, results
from tilekern.kernel.sharding_rule import ShardingRule, part_types, rule_of
from tilekern.kernel.signature import check_sizes, select
from tilekern.kernel.stated_sharding import stated
from tilekern.lower.target import Target


def kernel_call(definition: Definition, arguments: Sequence[Any], options: Options, target: Target) -> TypedCall:
    """A call of a kernel on arguments of given types, which are checked; the body is traced for `target` first."""
    result_types = _results(definition, arguments, options.statics)
    return TypedCall(definition, tuple(arguments), options, target, result_types, definition.settings(), tuned.active())


def instance(body: Body) -> Instance:
    """The kernel whose body is traced with the blocks of each target."""
    outputs = jax.tree.leaves(body.call.results.trees)

    def rule() -> ShardingRule | None:
        has_none = body.captures_tracers or any(t.dtype in FOUR_BITS for t in (*body.types(), *outputs))
        return None if has_none else _rule(body)

    def part(parts: Mapping[str, int], of_elements: bool = False) -> Instance | str:
        part = _part(body, cast(ShardingRule, kernel.rule), outputs, parts, of_elements)
        return part if isinstance(part, str) else instance(part)

    def whole(operand: int, dim: int) -> str:
        func = body.first.tracing.func
        return sharding_of(func).whole.get((func.params.index(func.inputs[operand]), dim), "no program reads it")

    def derivatives_from() -> Instance:
        copy = body.for_derivatives()
        return kernel if copy is body else instance(copy)

    def varied(settings: Mapping[str, Tunable], target: Target | None) -> Instance:
        options = body.call.options
        options = options._replace(blocks={**options.blocks, **settings}, asked=target or options.asked)
        return instance(Body(replace(body.call, options=options)))

    kernel = Instance(
        name=body.call.name,
        asked=body.call.asked,
        target=body.call.target,
        outputs=outputs,
        divisible=Divisible(
            rule,
            part,
            Elements(partial(part, of_elements=True), whole),
            body.call.definition.rules.instead_of_gathers,
        ),
        types_of_operands=body.types,
        version=body.version,
        launch=body.launch,
        derivatives=_derivatives(body.call)._replace(
            source=derivatives_from if body.has_blocks_for_derivatives or body.models_derivatives else None
        ),
        tuning=Tuning(
            body.settings,
            varied,
            body.key,
            partial(body.key, of_shipped=True),
            body.call.signature,
            body.call.options.blocks,
            lambda: instance(body.for_derivatives(always=True)),
        ),
        emitter=body.emitter,
    )
    return kernel


def _derivatives(call: TypedCall) -> Derivatives:
    """The rules of the author, by which the results and their tangents are computed, or rules from the block IR."""
    definition, rules = call.definition, call.rules

    def jvp(_: Instance, primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any]]:
        return stated_rules.jvp(call, primals, tangents)

    def transpose(_: Instance, cotangents: Sequence[Any], operands: Sequence[Any]) -> Sequence[Any]:
        return stated_rules.transpose(call, cotangents, operands)

    return Derivatives(
        derived_rules.jvp if rules.states_none else jvp,
        derived_rules.transpose if rules.transpose is None else transpose,
        residuals=definition.residuals,
        are_stated=not rules.states_none,
        have_blocks=definition.derives == "stated",
    )


# --- parts of arrays ------------------------------------------------------------------------------------------------


def _rule(body: Body) -> ShardingRule:
    """The sharding rule that the author states, or that follows from the accesses."""
    call, func = body.call, body.first.tracing.func
    operand_count, of_author = len(jax.tree.leaves(call.arguments)), call.rules.sharding
    if of_author is not None:
        return stated(of_author(*call.arguments, **select(of_author, call.options.statics)), func, operand_count)
    is_scheduled = not call.options.blocks.keys() >= set(call.signature.tunables)
    return rule_of(func, operand_count, with_other_blocks=is_scheduled)


def _part(body: Body, rule: ShardingRule, outputs: Types, parts: Mapping[str, int], of_elements: bool) -> Body | str:
    """The body on the parts of operands; or, as a str, the reason why it is not proved to compute parts of results."""
    leaves, tree = _jax.flatten(body.call.arguments)
    operands = part_types(body.types(), rule.operands, parts)
    arguments, call = jax.tree.unflatten(tree, operands[: len(leaves)]), body.call
    try:
        of_part = kernel_call(call.definition, arguments, call.options, call.target)
    except Exception as error:  # of the user's out_type, which may take sizes of the whole only
        return failed(error)
    types = [(x.shape, x.dtype) for x in jax.tree.leaves(of_part.results.trees)]
    if types != [(x.shape, x.dtype) for x in part_types(outputs, rule.results, parts)]:
        return "the body depends on its size (the shapes of results)"
    places = _places(body, rule)
    proof = Proof(body, {places[name]: count for name, count in parts.items()}, of_elements)
    part = Body(replace(of_part, settings=call.settings, tuned=call.tuned), proof)
    return part.unproved(call.target) or part


def _places(body: Body, rule: ShardingRule) -> dict[str, frozenset[Place]]:
    """For each name of the rule the dims of params that it stands for, as pairs (number of the param, dim)."""
    func, by_name = body.first.tracing.func, defaultdict[str, set[Place]](set)
    for params, side in ((func.inputs, rule.operands), (func.outputs, rule.results)):
        for param, dims in zip(params, side, strict=True):
            for n, name in enumerate(dims):
                by_name[name].add((func.params.index(param), n))
    return {name: frozenset(places) for name, places in by_name.items()}


# --- checks ---------------------------------------------------------------------------------------------------------


def _results(definition: Definition, arguments: Sequence[Any], statics: Mapping[str, Any]) -> Results:
    """The results of a kernel, checked against its parameters.

    Raises:
      ArgumentError: the numbers of inputs and outputs do not fit the parameters, or an output is donated.
    """
    name, names = definition.signature.name, definition.signature.arrays
    with source.at(source.current()):  # the call: frames of an out_type are the user's, too
        declared = definition.declared_type(arguments, statics)
        count = len(declared) if isinstance(declared, tuple) else 1  # pyright: ignore[reportUnknownArgumentType] -- the user's
        if len(arguments) + count != len(names):
            options = [*definition.signature.tunables, *definition.signature.statics]
            raise ArgumentError(
                f"{name} is called with the wrong number of arrays",
                expected=f"inputs and outputs for its parameters, {', '.join(names)}",
                got=f"inputs: {len(arguments)}, outputs of out_type: {count}",
                fix="give one argument for each input; the last parameters are the outputs, one for each of out_type"
                + (f"; give {', '.join(options)} by keyword" if options else ""),
            )
    donated = [a for n, a in zip(names, arguments, strict=False) if n in definition.donate]
    with source.at(definition.loc):
        if any(n in definition.donate for n in names[len(arguments) :]):
            raise ArgumentError(
                f"{name} donates an output",
                expected=f"names among the inputs, {', '.join(names[: len(arguments)])}",
                got=f"donate = {definition.donate!r}",
                fix="an output is the kernel's to write anyway; leave it out of donate",
            )
        checked_results = results(name, donated, declared)
    check_sizes(name, {f"result {n}": x for n, x in enumerate(jax.tree.leaves(checked_results.trees))})
    return checked_results
