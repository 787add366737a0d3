//! Operations of pickles, by the names of Python's `pickle` module.

macro_rules! opcodes {
    ($($name:ident = $code:literal;)*) => { $(pub(super) const $name: u8 = $code;)* };
}

opcodes! {
    MARK = b'('; STOP = b'.'; POP = b'0'; POP_MARK = b'1'; DUP = b'2'; BININT = b'J'; BININT1 = b'K'; BININT2 = b'M';
    NONE = b'N'; BINPERSID = b'Q'; REDUCE = b'R'; SHORT_BINSTRING = b'U'; BINUNICODE = b'X'; APPEND = b'a';
    BUILD = b'b'; GLOBAL = b'c'; DICT = b'd'; EMPTY_DICT = b'}'; APPENDS = b'e'; BINGET = b'h'; LONG_BINGET = b'j';
    LIST = b'l'; EMPTY_LIST = b']'; BINPUT = b'q'; LONG_BINPUT = b'r'; SETITEM = b's'; TUPLE = b't';
    EMPTY_TUPLE = b')'; SETITEMS = b'u'; BINFLOAT = b'G'; PROTO = 0x80; NEWOBJ = 0x81; TUPLE1 = 0x85; TUPLE2 = 0x86;
    TUPLE3 = 0x87; TRUE = 0x88; FALSE = 0x89; LONG1 = 0x8a; LONG4 = 0x8b; BINBYTES = b'B'; SHORT_BINBYTES = b'C';
    SHORT_BINUNICODE = 0x8c; BINUNICODE8 = 0x8d; BINBYTES8 = 0x8e; EMPTY_SET = 0x8f; ADDITEMS = 0x90;
    FROZENSET = 0x91; NEWOBJ_EX = 0x92; STACK_GLOBAL = 0x93; MEMOIZE = 0x94; FRAME = 0x95; BYTEARRAY8 = 0x96;
}
