/* Every kind of value as C has it, for test_values.py: saves them, or resumes what any language saved and compares.
 *
 * usage: values save|check ROOT. Under each name rank 0's value, and under "own.<name>" one of every rank. */
#include <float.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <tessera/tessera.h>

#define CHECK(call) ((call) == TSR_OK ? (void)0 : fail(#call))
#define COUNT(array) (sizeof(array) / sizeof *(array))

static const struct {
    const char *name;
    int64_t value;
} integers[] = {
    {"zero", 0},         {"minus seven", -7},  {"beyond doubles", (INT64_C(1) << 53) + 1},
    {"most", INT64_MAX}, {"least", INT64_MIN},
};

static const struct {
    const char *name;
    double value;
} doubles[] = {
    {"whole", 3.0},    {"minus zero", -0.0},     {"sum", 0.1 + 0.2},   {"exact", 9007199254740992.0},
    {"tricky", 1e23},  {"largest", DBL_MAX},     {"smallest", 5e-324}, {"nan", NAN},
    {"inf", INFINITY}, {"minus inf", -INFINITY},
};

/* Typed JSON, as docs/FORMAT.md has it. */
static const struct {
    const char *name;
    const char *json;
} others[] = {
    {"null", "null"},
    {"true", "true"},
    {"false", "false"},
    {"big", "{\"~\":\"int\",\"v\":\"9223372036854775808\"}"},
    {"minus big", "{\"~\":\"int\",\"v\":\"-9223372036854775809\"}"},
    {"huge", "{\"~\":\"int\",\"v\":\"1606938044258990275541962092341162602522202993782792835301376\"}"},
    {"text",
     "\"a \\\"quoted\\\" \\\\ line\\n\\ttab \\u0000 NUL \\u001f \\u007f größe 權重 \\u2028 \\ud83d\\ude00 <\\/\""},
    {"no text", "\"\""},
    {"größe.權重", "\"gr\\u00f6ße\""},
    {"bytes", "{\"~\":\"bytes\",\"v\":\"AP+ACiJc\"}"},
    {"no bytes", "{\"~\":\"bytes\",\"v\":\"\"}"},
    {"list", "[null, true, -1, 2.5, \"ä\", [], [[9007199254740993]]]"},
    {"no list", "[]"},
    {"tuple", "{\"~\":\"tuple\",\"v\":[1, \"a\", {\"~\":\"tuple\",\"v\":[2.0]}, [{\"~\":\"bytes\",\"v\":\"AQ==\"}]]}"},
    {"no tuple", "{\"~\":\"tuple\",\"v\":[]}"},
    {"map",
     "{\"z\": 1, \"a\": {\"none\": null, \"größe\": [1.0, 2, -0.0]}, \"a \\\"key\\\"\\n\": {\"deeper\": {\"deepest\": "
     "{\"~\":\"tuple\",\"v\":[{\"~\":\"int\",\"v\":\"9223372036854775808\"}]}}}}"},
    {"no map", "{}"},
    {"keys",
     "{\"~\":\"map\",\"v\":[[3,\"int\"],[true,\"bool\"],[null,\"null\"],[{\"~\":\"tuple\",\"v\":[1,2]},\"tuple\"],"
     "[2.5,\"double\"],[{\"~\":\"bytes\",\"v\":\"aw==\"},\"bytes\"],"
     "[\"s\",{\"~\":\"map\",\"v\":[[\"~\",{\"~\":\"double\",\"v\":\"inf\"}]]}]]}"},
    {"tag", "{\"~\":\"map\",\"v\":[[\"~\",\"no tag\"],[\"v\",1]]}"},
};

static void fail(const char *call) {
    fprintf(stderr, "C: %s: %s\n", call, tsr_error_message(tsr_error_last()));
    exit(1);
}

static const char *under(const char *prefix, const char *name) {
    static char joined[100];
    snprintf(joined, sizeof joined, "%s%s", prefix, name);
    return joined;
}

static void fill(tsr_state *state, const char *prefix) {
    for (size_t i = 0; i < COUNT(integers); ++i) {
        CHECK(tsr_state_set_int64(state, under(prefix, integers[i].name), integers[i].value));
    }
    for (size_t i = 0; i < COUNT(doubles); ++i) {
        CHECK(tsr_state_set_double(state, under(prefix, doubles[i].name), doubles[i].value));
    }
    for (size_t i = 0; i < COUNT(others); ++i) {
        CHECK(tsr_state_set_value(state, under(prefix, others[i].name), others[i].json));
    }
}

static void blank(tsr_state *state, const char *prefix) {
    for (size_t i = 0; i < COUNT(integers); ++i) {
        CHECK(tsr_state_set_value(state, under(prefix, integers[i].name), "null"));
    }
    for (size_t i = 0; i < COUNT(doubles); ++i) {
        CHECK(tsr_state_set_value(state, under(prefix, doubles[i].name), "null"));
    }
    for (size_t i = 0; i < COUNT(others); ++i) {
        CHECK(tsr_state_set_value(state, under(prefix, others[i].name), "null"));
    }
}

static void compare_text(const tsr_state *state, const tsr_state *wanted, const char *name) {
    char got[1000], expected[1000];
    size_t size;
    CHECK(tsr_state_get_value(state, name, got, sizeof got, &size));
    CHECK(tsr_state_get_value(wanted, name, expected, sizeof expected, &size));
    if (strcmp(got, expected) == 0) return;
    fprintf(stderr, "C: %s is %s, not %s\n", name, got, expected);
    exit(1);
}

static void compare(const tsr_state *state, const tsr_state *wanted, const char *prefix) {
    for (size_t i = 0; i < COUNT(integers); ++i) {
        const char *name = under(prefix, integers[i].name);
        int64_t got;
        compare_text(state, wanted, name);
        CHECK(tsr_state_get_int64(state, name, &got));
        if (got == integers[i].value) continue;
        fprintf(stderr, "C: %s is %lld, not %lld\n", name, (long long)got, (long long)integers[i].value);
        exit(1);
    }
    for (size_t i = 0; i < COUNT(doubles); ++i) {
        const char *name = under(prefix, doubles[i].name);
        double got;
        compare_text(state, wanted, name);
        CHECK(tsr_state_get_double(state, name, &got));
        if (isnan(got) && isnan(doubles[i].value)) continue;
        if (got == doubles[i].value && !signbit(got) == !signbit(doubles[i].value)) continue;
        fprintf(stderr, "C: %s is %a, not %a\n", name, got, doubles[i].value);
        exit(1);
    }
    for (size_t i = 0; i < COUNT(others); ++i) compare_text(state, wanted, under(prefix, others[i].name));
}

int main(int argc, char **argv) {
    tsr_comm *comm;
    tsr_state *state, *wanted;
    tsr_saver *saver;
    int32_t rank;
    char own[100];
    if (argc != 3) return 2;
    CHECK(tsr_comm_from_env(NULL, &comm));
    CHECK(tsr_comm_rank(comm, &rank));
    snprintf(own, sizeof own, "rank/%d/own.", (int)rank);
    CHECK(tsr_state_create(&wanted));
    fill(wanted, "");
    fill(wanted, own);
    CHECK(tsr_saver_create(comm, argv[2], NULL, &saver));
    if (strcmp(argv[1], "save") == 0) {
        CHECK(tsr_saver_save(saver, 1, wanted));
    } else {
        int64_t step;
        CHECK(tsr_state_create(&state));
        blank(state, "");
        blank(state, own);
        CHECK(tsr_saver_resume(saver, state, &step));
        if (step != 1) {
            fprintf(stderr, "C: there is no save\n");
            return 1;
        }
        compare(state, wanted, "");
        compare(state, wanted, own);
        tsr_state_destroy(state);
    }
    CHECK(tsr_comm_finalize(comm));
    tsr_saver_destroy(saver), tsr_state_destroy(wanted), tsr_comm_destroy(comm);
    return 0;
}
