"""SASS listings for tests of the cycle model, in the disassembler's form."""


def sass(text: str) -> str:
    """A listing in the disassembler's form, from lines of instructions and labels."""
    lines, address = [], 0
    for line in filter(None, map(str.strip, text.splitlines())):
        if line.endswith(":"):
            lines.append(line)
            continue
        lines.append(f"        /*{address:04x}*/                   {line} ;")
        address += 16
    return "\n".join(lines)


def loop(body: str, trips: int, before: str = "", after: str = "") -> str:
    """A listing with one loop."""
    return sass(f"""
        {before}
        UMOV UR60, URZ
        .L_x_0:
        {body}
        UIADD3 UR60, UR60, 0x1, URZ
        UISETP.NE.U32.AND UP0, UPT, UR60, {trips:#x}, UPT
        PLOP3.LUT P6, PT, PT, PT, UP0, 0x80, 0x0
        @P6 BRA `(.L_x_0)
        {after}
        EXIT
    """)
