"""The gates themselves: a doc block, a prototype or a list that is wrong is noticed."""

import tempfile
import unittest
from pathlib import Path

from check_docs import complaints
from check_symbols import differences
from headers import Api, Function, parameters, read_into, variable

GOOD = """ Do something.
 @param comm  borrowed for the call
 @param out   the thing
 @return TSR_OK
 @threadsafety any thread  @collective no  @blocking no  @since 0.1 experimental """


def said(doc, params=("comm", "out"), returns="tsr_status"):
    return list(complaints(Function("x.h", "tsr_x", returns, [variable(f"int32_t {name}") for name in params], doc)))


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


class Reader(unittest.TestCase):
    def read(self, text):
        with tempfile.TemporaryDirectory() as directory:
            header = Path(directory, "x.h")
            header.write_text(text)
            api = Api()
            read_into(api, header)
            return api

    def test_a_function_is_read_with_its_types_and_its_block(self):
        prototype = "TSR_API TSR_MUST_USE tsr_status tsr_f(const char *const *n, void *p);"
        (function,) = self.read(f"/** Ends.\n *  @blocking yes  @since 0.1 */\n{prototype}").functions
        self.assertEqual((function.name, function.returns, function.tag("blocking")), ("tsr_f", "tsr_status", "yes"))
        self.assertEqual([param.type for param in function.params], ["const char *const *", "void *"])

    def test_fields_are_read_with_the_comments_that_are_theirs(self):
        body = (
            "    size_t n; /* how\n  many */\n    /* Before. */\n    const char\n        *key;\n    int64_t sizes[4];\n"
        )
        (struct,) = self.read(f"typedef struct tsr_s {{\n{body}}} tsr_s;\n").structs
        self.assertEqual([field.doc for field in struct.fields], ["how many", "Before.", ""])
        self.assertEqual(
            [(field.type, field.length) for field in struct.fields][1:], [("const char *", ""), ("int64_t", "4")]
        )

    def test_what_it_does_not_understand_is_an_error(self):
        for text in (
            "TSR_API int tsr_f(int",
            "enum { TSR_A };",
            "typedef struct tsr_s {int a;} tsr_s;",
            "typedef int a[3];",
        ):
            with self.subTest(text), self.assertRaises(SystemExit):
                self.read(text)

    def test_parameters(self):
        self.assertEqual(variable("void (*destroy)(void *user_data)").name, "destroy")
        self.assertEqual(parameters("void"), [])


class Lists(unittest.TestCase):
    def test_both_directions_are_told(self):
        self.assertEqual(differences({"a"}, "x", {"b"}, "y"), ["a: in x, not in y", "b: in y, not in x"])


if __name__ == "__main__":
    unittest.main()
