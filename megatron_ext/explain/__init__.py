# SPDX-License-Identifier: Apache-2.0
"""What a command line would do: groups, memory and traffic, from one rank that is built without a GPU or memory.

Megatron and the features parse and check the command line as in a run. Then one rank of the job is built by Megatron's
own code, in a process of its own, with process groups of the job's size that carry nothing (torch's `fake` backend) and
tensors that have a shape but no memory. What is counted are those tensors; what no tensor says is a formula, and named
one (docs/explain.md).
"""
