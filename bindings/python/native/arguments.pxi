# Converts Python values to C. Nothing is truncated or wraps around: an error names the value that does not fit.

cdef bytes utf8(object text, str what):
    if not isinstance(text, str):
        raise TypeError(f"{what} is {text!r}; expected a str")
    if "\0" in text:
        raise InvalidArgument(f"{what} {text[:80]!r} contains a zero character")
    try:
        return text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        raise InvalidArgument(f"{what} {text[:80]!r} contains half of a surrogate pair, which UTF-8 cannot encode"
                              ) from None


cdef const char *text_or_null(list keep, object text, str what) except? NULL:
    """A C string that `keep` keeps alive; NULL for None."""
    if text is None:
        return NULL
    encoded = utf8(text, what)
    keep.append(encoded)
    return PyBytes_AsString(encoded)


cdef object integer(object value, str what):
    if type(value) is int:
        return value
    try:
        return index(value)
    except TypeError:
        raise TypeError(f"{what} is {value!r}; expected an integer") from None


cdef int64_t whole(object value, str what, int64_t low, int64_t high) except? -1:
    """An integer from `low` to `high`. Accepts NumPy integers, but no floats."""
    cdef int overflow = 0
    value = integer(value, what)
    cdef int64_t number = PyLong_AsLongLongAndOverflow(value, &overflow)
    if overflow or number < low or number > high:
        raise InvalidArgument(f"{what} is {value}; it must be between {low} and {high}")
    return number


cdef int32_t flag(object value, str what) except -1:
    """1 or 0 of a bool of Python or NumPy. Refuses all else, so that "false" is not taken for true."""
    if not isinstance(value, (bool, bool_)):
        raise TypeError(f"{what} is {value!r}; it must be a bool")
    return 1 if value else 0


cdef int32_t int32(object value, str what) except? -1:
    return <int32_t>whole(value, what, -2**31, 2**31 - 1)


cdef int64_t int64(object value, str what) except? -1:
    return whole(value, what, -2**63, 2**63 - 1)


cdef size_t size_of(object value, str what) except? <size_t>-1:
    """A number of bytes or elements, or an index."""
    return <size_t>whole(value, what, 0, 2**63 - 1)


cdef uint64_t uint64(object value, str what) except? <uint64_t>-1:
    value = integer(value, what)
    if not 0 <= value < 2**64:
        raise InvalidArgument(f"{what} is {value}; it must be between 0 and 2**64 - 1")
    return value


cdef double real(object value, str what) except? -1:
    if isinstance(value, (str, bytes)):
        raise TypeError(f"{what} is {value!r}; expected a number")
    try:
        return float(value)
    except TypeError:
        raise TypeError(f"{what} is {value!r}; expected a number") from None
    except OverflowError:
        raise InvalidArgument(f"{what} is {value!r}; it does not fit in a float") from None
