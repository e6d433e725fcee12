package dev.tessera;

import java.math.BigInteger;
import java.util.AbstractList;
import java.util.ArrayList;
import java.util.Base64;
import java.util.Collections;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;

/**
 * Values of a {@link State} as Java objects. The kinds are those of docs/FORMAT.md, which every language reads:
 *
 * <table>
 * <caption>Kinds of values</caption>
 * <tr><th>kind</th><th>written from</th><th>read as</th></tr>
 * <tr><td>null</td><td>null</td><td>null</td></tr>
 * <tr><td>bool</td><td>Boolean</td><td>Boolean</td></tr>
 * <tr><td>int</td><td>Byte, Short, Integer, Long, BigInteger</td><td>Long, or BigInteger beyond 64 bits</td></tr>
 * <tr><td>double</td><td>Float, Double, NaN and infinities too</td><td>Double</td></tr>
 * <tr><td>string</td><td>String</td><td>String</td></tr>
 * <tr><td>bytes</td><td>byte[]</td><td>byte[]</td></tr>
 * <tr><td>list</td><td>List</td><td>unmodifiable List</td></tr>
 * <tr><td>tuple</td><td>{@link Tuple}</td><td>{@link Tuple}</td></tr>
 * <tr><td>map</td><td>Map, keys of any kind</td><td>unmodifiable Map, in the order of the file</td></tr>
 * </table>
 */
public final class Values {
    private static final int MAX_DEPTH = 64;
    private static final String TAG = "~";
    private static final String CONTENT = "v";

    private Values() {}

    /** A list that other languages see as a tuple. Unmodifiable. */
    public static final class Tuple extends AbstractList<Object> {
        private final List<Object> items;

        private Tuple(List<?> items) {
            this.items = new ArrayList<>(items);
        }

        /**
         * A tuple.
         *
         * @param items values
         * @return the tuple
         */
        public static Tuple of(Object... items) {
            return new Tuple(List.of(items));
        }

        @Override
        public Object get(int index) {
            return items.get(index);
        }

        @Override
        public int size() {
            return items.size();
        }
    }

    static String toJson(Object value) {
        final StringBuilder out = new StringBuilder();
        write(out, value, 0);
        return out.toString();
    }

    static Object fromJson(String json) {
        return untag(new Parser(json).document());
    }

    /** JSON that is not of a state's values, so without tags; objects are mutable maps in the order of the text. */
    static Object fromPlainJson(String json) {
        return new Parser(json).document();
    }

    // Writing.

    private static void write(StringBuilder out, Object value, int depth) {
        if (depth > MAX_DEPTH) {
            throw new IllegalArgumentException("a value is nested more than " + MAX_DEPTH + " levels deep");
        }
        if (value == null || value instanceof Boolean) {
            out.append(value);
        } else if (value instanceof Byte || value instanceof Short || value instanceof Integer || value instanceof Long) {
            out.append(((Number) value).longValue());
        } else if (value instanceof BigInteger) {
            writeInteger(out, (BigInteger) value);
        } else if (value instanceof Float || value instanceof Double) {
            writeDouble(out, ((Number) value).doubleValue());
        } else if (value instanceof String) {
            writeString(out, (String) value);
        } else if (value instanceof byte[]) {
            writeTagged(out, "bytes", Base64.getEncoder().encodeToString((byte[]) value));
        } else if (value instanceof Tuple) {
            out.append("{\"~\":\"tuple\",\"v\":");
            writeList(out, (List<?>) value, depth);
            out.append('}');
        } else if (value instanceof List) {
            writeList(out, (List<?>) value, depth);
        } else if (value instanceof Map) {
            writeMap(out, (Map<?, ?>) value, depth);
        } else {
            throw new IllegalArgumentException("a " + value.getClass().getName() + " cannot be saved in a checkpoint; use"
                    + " null, Boolean, integers, Float, Double, String, byte[], List, Values.Tuple or Map");
        }
    }

    private static void writeInteger(StringBuilder out, BigInteger value) {
        if (value.bitLength() < 64) {
            out.append(value);
        } else {
            writeTagged(out, "int", value.toString());
        }
    }

    private static void writeDouble(StringBuilder out, double value) {
        if (Double.isNaN(value)) {
            writeTagged(out, "double", "nan");
        } else if (Double.isInfinite(value)) {
            writeTagged(out, "double", value > 0 ? "inf" : "-inf");
        } else {
            out.append(value); // always with a point
        }
    }

    private static void writeTagged(StringBuilder out, String kind, String content) {
        out.append("{\"~\":\"").append(kind).append("\",\"v\":\"").append(content).append("\"}");
    }

    private static void writeList(StringBuilder out, List<?> list, int depth) {
        out.append('[');
        String separator = "";
        for (Object item : list) {
            out.append(separator);
            write(out, item, depth + 1);
            separator = ",";
        }
        out.append(']');
    }

    private static void writeMap(StringBuilder out, Map<?, ?> map, int depth) {
        final boolean plain = map.keySet().stream().allMatch(key -> key instanceof String && !key.equals(TAG));
        out.append(plain ? "{" : "{\"~\":\"map\",\"v\":[");
        String separator = "";
        for (Map.Entry<?, ?> entry : map.entrySet()) {
            out.append(separator).append(plain ? "" : "[");
            write(out, entry.getKey(), depth + 1);
            out.append(plain ? ':' : ',');
            write(out, entry.getValue(), depth + 1);
            out.append(plain ? "" : "]");
            separator = ",";
        }
        out.append(plain ? "}" : "]}");
    }

    private static void writeString(StringBuilder out, String text) {
        out.append('"');
        for (int i = 0; i < text.length(); ++i) {
            final char c = text.charAt(i);
            if (Character.isSurrogate(c)) {
                if (!Character.isHighSurrogate(c) || i + 1 == text.length()
                        || !Character.isLowSurrogate(text.charAt(i + 1))) {
                    throw new IllegalArgumentException("a string is not valid Unicode: it has an unpaired surrogate at " + i);
                }
                out.append(c).append(text.charAt(++i));
            } else if (c == '"' || c == '\\') {
                out.append('\\').append(c);
            } else if (c < 0x20) {
                out.append(String.format("\\u%04x", (int) c));
            } else {
                out.append(c);
            }
        }
        out.append('"');
    }

    // Reading: JSON first, then the tags.

    private static Object untag(Object json) {
        if (json instanceof List) {
            return Collections.unmodifiableList(untagAll((List<?>) json));
        }
        if (!(json instanceof Map)) {
            return json;
        }
        final Map<?, ?> object = (Map<?, ?>) json;
        if (object.containsKey(TAG)) {
            return untag((String) object.get(TAG), object.get(CONTENT));
        }
        final Map<Object, Object> map = new LinkedHashMap<>();
        object.forEach((key, value) -> map.put(key, untag(value)));
        return Collections.unmodifiableMap(map);
    }

    private static Object untag(String kind, Object content) {
        switch (kind) {
            case "bytes":
                return Base64.getDecoder().decode((String) content);
            case "int":
                return new BigInteger((String) content);
            case "double":
                return content.equals("nan") ? Double.NaN
                        : content.equals("inf") ? Double.POSITIVE_INFINITY : Double.NEGATIVE_INFINITY;
            case "tuple":
                return new Tuple(untagAll((List<?>) content));
            case "map":
                final Map<Object, Object> map = new LinkedHashMap<>();
                for (Object pair : (List<?>) content) {
                    map.put(untag(((List<?>) pair).get(0)), untag(((List<?>) pair).get(1)));
                }
                return Collections.unmodifiableMap(map);
            default:
                throw new IllegalStateException("a value has the kind \"" + kind + "\", which is unknown to this binding");
        }
    }

    private static List<Object> untagAll(List<?> items) {
        final List<Object> out = new ArrayList<>();
        items.forEach(item -> out.add(untag(item)));
        return out;
    }

    /** Parses the JSON that the library writes, which has checked its form and depth. */
    private static final class Parser {
        private final String text;
        private int at;

        Parser(String text) {
            this.text = text;
        }

        Object document() {
            final Object value = value();
            skipSpace();
            if (at != text.length()) {
                throw wrong("the end");
            }
            return value;
        }

        private Object value() {
            skipSpace();
            switch (peek()) {
                case '{':
                    return object();
                case '[':
                    return array();
                case '"':
                    return string();
                case 't':
                    return word("true", Boolean.TRUE);
                case 'f':
                    return word("false", Boolean.FALSE);
                case 'n':
                    return word("null", null);
                default:
                    return number();
            }
        }

        private Map<String, Object> object() {
            final Map<String, Object> out = new LinkedHashMap<>();
            expect('{');
            while (!closes('}', out.isEmpty())) {
                skipSpace();
                final String key = string();
                skipSpace();
                expect(':');
                out.put(key, value());
            }
            return out;
        }

        private List<Object> array() {
            final List<Object> out = new ArrayList<>();
            expect('[');
            while (!closes(']', out.isEmpty())) {
                out.add(value());
            }
            return out;
        }

        /** Takes the closing bracket, or the comma before another item. */
        private boolean closes(char bracket, boolean first) {
            skipSpace();
            if (peek() == bracket) {
                ++at;
                return true;
            }
            if (!first) {
                expect(',');
            }
            return false;
        }

        private String string() {
            final StringBuilder out = new StringBuilder();
            expect('"');
            while (peek() != '"') {
                char c = text.charAt(at++);
                if (c == '\\') {
                    c = escape();
                }
                out.append(c);
            }
            ++at;
            return out.toString();
        }

        private char escape() {
            final char c = peek();
            ++at;
            final int simple = "\"\\/bfnrt".indexOf(c);
            if (simple >= 0) {
                return "\"\\/\b\f\n\r\t".charAt(simple);
            }
            if (c != 'u' || at + 4 > text.length()) {
                throw wrong("an escape");
            }
            at += 4;
            return (char) Integer.parseInt(text.substring(at - 4, at), 16);
        }

        private Object word(String word, Object value) {
            if (!text.startsWith(word, at)) {
                throw wrong(word);
            }
            at += word.length();
            return value;
        }

        private Object number() {
            final int from = at;
            while (at < text.length() && "+-.eE0123456789".indexOf(text.charAt(at)) >= 0) {
                ++at;
            }
            final String digits = text.substring(from, at);
            try {
                if (digits.matches("-?[0-9]+")) {
                    final BigInteger whole = new BigInteger(digits);
                    return whole.bitLength() < 64 ? (Object) whole.longValue() : whole;
                }
                return Double.parseDouble(digits);
            } catch (NumberFormatException error) {
                throw wrong("a number");
            }
        }

        private void skipSpace() {
            while (at < text.length() && " \t\r\n".indexOf(text.charAt(at)) >= 0) {
                ++at;
            }
        }

        private char peek() {
            if (at >= text.length()) {
                throw wrong("more text");
            }
            return text.charAt(at);
        }

        private void expect(char c) {
            if (peek() != c) {
                throw wrong("'" + c + "'");
            }
            ++at;
        }

        private IllegalStateException wrong(String expected) {
            return new IllegalStateException("the library's JSON lacks " + expected + " at " + at + ": " + text);
        }
    }
}
