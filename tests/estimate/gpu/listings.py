"""SASS listings for tests of the cycle model, in the disassembler's form."""

from tilekern.estimate.gpu import Launch

ONE = Launch(programs=132, warps=4)
"""One program for each multiprocessor of an H100."""

PRODUCT = "WARPGROUP.ARRIVE\n" + "HGMMA.64x128x16.F32.BF16 R24, gdesc[UR8], R24\n" * 7
PRODUCT += "HGMMA.64x128x16.F32.BF16 R24, gdesc[UR8], R24, gsb0"
WAIT = "WARPGROUP.DEPBAR.LE gsb0, 0x0"
EXPONENTIALS = "\n".join(f"MUFU.EX2 R{100 + n}, R{100 + n}" for n in range(48))


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
