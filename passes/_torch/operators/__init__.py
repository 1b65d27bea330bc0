"""Operators that communicate, with arguments that are equal on all ranks, so that programs are one text."""
