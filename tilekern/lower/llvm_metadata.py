"""Texts of LLVM's metadata: programs of Triton and of `cpu:llvm` have it for the places of their instructions."""


def string(text: str) -> str:
    r"""A string of LLVM's IR: `"a\22b"`."""
    special = ('"', "\\")
    printed = (chr(b) if " " <= chr(b) <= "~" and chr(b) not in special else f"\\{b:02X}" for b in text.encode())
    return f'"{"".join(printed)}"'
