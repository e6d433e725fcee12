import dev.tessera.Comm;
import dev.tessera.Saver;
import dev.tessera.State;
import dev.tessera.Values.Tuple;
import java.math.BigInteger;
import java.nio.file.Path;
import java.util.Arrays;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.stream.Collectors;

/**
 * Every kind of value as Java has it, for test_values.py: saves them, or resumes what any language saved and compares.
 * Arguments: save or check, and the root. Under each name rank 0's value, and under "own.NAME" one of every rank.
 */
public final class EveryValue {
    private EveryValue() {}

    private static final Map<String, Object> VALUES = new LinkedHashMap<>();

    static {
        VALUES.put("null", null);
        VALUES.put("true", true);
        VALUES.put("false", false);
        VALUES.put("zero", 0L);
        VALUES.put("minus seven", -7L);
        VALUES.put("beyond doubles", (1L << 53) + 1);
        VALUES.put("most", Long.MAX_VALUE);
        VALUES.put("least", Long.MIN_VALUE);
        VALUES.put("big", BigInteger.TWO.pow(63));
        VALUES.put("minus big", BigInteger.TWO.pow(63).negate().subtract(BigInteger.ONE));
        VALUES.put("huge", BigInteger.TWO.pow(200));
        VALUES.put("whole", 3.0);
        VALUES.put("minus zero", -0.0);
        VALUES.put("sum", 0.1 + 0.2);
        VALUES.put("exact", (double) (1L << 53));
        VALUES.put("tricky", 1e23);
        VALUES.put("largest", Double.MAX_VALUE);
        VALUES.put("smallest", Double.MIN_VALUE);
        VALUES.put("nan", Double.NaN);
        VALUES.put("inf", Double.POSITIVE_INFINITY);
        VALUES.put("minus inf", Double.NEGATIVE_INFINITY);
        VALUES.put("text", "a \"quoted\" \\ line\n\ttab \0 NUL \37 \177 größe 權重 \u2028 \uD83D\uDE00 </");
        VALUES.put("no text", "");
        VALUES.put("größe.權重", "größe");
        VALUES.put("bytes", new byte[] {0, -1, -128, '\n', '"', '\\'});
        VALUES.put("no bytes", new byte[0]);
        VALUES.put("list", Arrays.asList(null, true, -1L, 2.5, "ä", List.of(), List.of(List.of((1L << 53) + 1))));
        VALUES.put("no list", List.of());
        VALUES.put("tuple", Tuple.of(1L, "a", Tuple.of(2.0), List.of(new byte[] {1})));
        VALUES.put("no tuple", Tuple.of());
        VALUES.put("map", map("z", 1L, "a", map("none", null, "größe", List.of(1.0, 2L, -0.0)), "a \"key\"\n",
                map("deeper", map("deepest", Tuple.of(BigInteger.TWO.pow(63))))));
        VALUES.put("no map", map());
        VALUES.put("keys", map(3L, "int", true, "bool", null, "null", Tuple.of(1L, 2L), "tuple", 2.5, "double",
                new byte[] {'k'}, "bytes", "s", map("~", Double.POSITIVE_INFINITY)));
        VALUES.put("tag", map("~", "no tag", "v", 1L));
    }

    private static Map<Object, Object> map(Object... pairs) {
        final Map<Object, Object> map = new LinkedHashMap<>();
        for (int i = 0; i < pairs.length; i += 2) {
            map.put(pairs[i], pairs[i + 1]);
        }
        return map;
    }

    /** Tells apart whatever differs: 1 and 1.0, a list and a tuple, 0.0 and -0.0, the order of keys. */
    private static String text(Object value) {
        if (value instanceof byte[]) {
            return "bytes " + Arrays.toString((byte[]) value);
        }
        if (value instanceof List) {
            return (value instanceof Tuple ? "tuple " : "list ")
                    + ((List<?>) value).stream().map(EveryValue::text).collect(Collectors.toList());
        }
        if (value instanceof Map) {
            return "map " + ((Map<?, ?>) value).entrySet().stream()
                    .map(entry -> text(entry.getKey()) + "=" + text(entry.getValue()))
                    .collect(Collectors.toList());
        }
        return value == null ? "null" : value.getClass().getSimpleName() + " " + value;
    }

    private static void check(State state, String name, Object expected) {
        final Object got = state.get(name);
        if (!text(got).equals(text(expected))) {
            throw new AssertionError("Java: " + name + " is " + text(got) + ", not " + text(expected));
        }
    }

    public static void main(String[] args) {
        try (Comm comm = Comm.fromEnv(); Saver saver = Saver.at(comm, Path.of(args[1])).open(); State state = new State()) {
            final String own = "rank/" + comm.rank() + "/own.";
            final boolean saves = args[0].equals("save");
            VALUES.forEach((name, value) -> {
                state.put(name, saves ? value : null);
                state.put(own + name, saves ? value : null);
            });
            if (saves) {
                saver.save(1, state);
            } else if (saver.resume(state) != 1) {
                throw new AssertionError("Java: there is no save");
            }
            VALUES.forEach((name, value) -> {
                check(state, name, value);
                check(state, own + name, value);
            });
            comm.finish();
        }
    }
}
