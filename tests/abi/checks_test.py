"""The gates themselves: a doc block, a prototype or a list that is wrong is noticed."""

import unittest

from check_docs import complaints
from check_symbols import differences
from headers import FUNCTION, Function, parameter_name

GOOD = """ Do something.
 @param comm  borrowed for the call
 @param out   the thing
 @return TSR_OK
 @threadsafety any thread  @collective no  @blocking no  @since 0.1 experimental """


def said(doc, params=("comm", "out"), returns="tsr_status"):
    return list(complaints(Function("x.h", "tsr_x", returns, list(params), doc)))


class DocBlocks(unittest.TestCase):
    def test_a_complete_one_passes(self):
        self.assertEqual(said(GOOD), [])

    def test_a_missing_one_is_noticed(self):
        self.assertEqual(said(""), ["has no doc block"])

    def test_each_missing_part_is_noticed(self):
        for part in ("@param comm", "@return", "@threadsafety", "@collective", "@blocking", "@since", "Do something."):
            with self.subTest(part):
                self.assertEqual(len(said(GOOD.replace(part, ""))), 1)

    def test_words_it_does_not_know_are_noticed(self):
        self.assertEqual(len(said(GOOD.replace("@collective no", "@collective maybe"))), 1)

    def test_an_unknown_parameter_and_another_order_are_noticed(self):
        self.assertTrue(said(GOOD, params=("comm",)))
        self.assertTrue(said(GOOD, params=("out", "comm")))

    def test_a_void_function_must_not_tell_a_return(self):
        self.assertTrue(said(GOOD, returns="void"))


class Prototypes(unittest.TestCase):
    def test_names_and_parameters_are_read(self):
        match = FUNCTION.search("/** A. */\nTSR_API TSR_MUST_USE tsr_status tsr_f(const char *const *names, size_t n);")
        self.assertEqual((match["name"], match["type"].split()), ("tsr_f", ["tsr_status"]))

    def test_parameter_names(self):
        self.assertEqual(parameter_name("const tsr_x *x"), "x")
        self.assertEqual(parameter_name("int64_t sizes[TSR_MAX_NDIM]"), "sizes")
        self.assertEqual(parameter_name("void (*destroy)(void *user_data)"), "destroy")


class Lists(unittest.TestCase):
    def test_both_directions_are_told(self):
        self.assertEqual(differences({"a"}, "x", {"b"}, "y"), ["a: in x, not in y", "b: in y, not in x"])


if __name__ == "__main__":
    unittest.main()
