package dev.tessera;

import static org.junit.jupiter.api.Assertions.assertArrayEquals;
import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertInstanceOf;
import static org.junit.jupiter.api.Assertions.assertThrows;

import java.math.BigInteger;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.Collections;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import org.junit.jupiter.api.Test;

/** Values through the library and back. */
class ValuesTest {
    private final State state = new State();

    private Object roundTrip(Object value) {
        state.put("value", value);
        return state.get("value");
    }

    @Test
    void everyKindComesBack() {
        assertEquals(null, roundTrip(null));
        assertEquals(true, roundTrip(true));
        assertEquals(-7L, roundTrip((Object) (byte) -7));
        assertEquals(Long.MIN_VALUE, roundTrip((Object) Long.MIN_VALUE));
        assertEquals(Long.MAX_VALUE, roundTrip(BigInteger.valueOf(Long.MAX_VALUE)));
        final BigInteger huge = BigInteger.TWO.pow(200).negate();
        assertEquals(huge, roundTrip(huge));
        for (double number : new double[] {0.1, -0.0, 1e300, Double.MIN_VALUE, 3, Double.NaN, Double.POSITIVE_INFINITY,
                Double.NEGATIVE_INFINITY}) {
            assertEquals(number, roundTrip((Object) number));
        }
        assertEquals((double) 0.1f, roundTrip((Object) 0.1f));
        final String text = "a \"quoted\" \\ line\n\ttab \u0000 NUL \u007f, Grüße \uD83D\uDE00 ~";
        assertEquals(text, roundTrip(text));
        assertArrayEquals(new byte[] {0, -1, 2, 3}, (byte[]) roundTrip(new byte[] {0, -1, 2, 3}));
        assertArrayEquals(new byte[0], (byte[]) roundTrip(new byte[0]));
        assertEquals(List.of(1L, List.of(), "x"), roundTrip(List.of(1, List.of(), "x")));
        final Object tuple = roundTrip(Values.Tuple.of(1L, "a"));
        assertInstanceOf(Values.Tuple.class, tuple);
        assertEquals(List.of(1L, "a"), tuple);
    }

    @Test
    void mapsKeepOrderAndKeys() {
        final Map<Object, Object> map = new LinkedHashMap<>();
        map.put("z", 1L);
        map.put("a", Arrays.asList(null, 2.5));
        assertEquals(map, roundTrip(map));
        assertEquals(new ArrayList<>(map.keySet()), new ArrayList<>(((Map<?, ?>) roundTrip(map)).keySet()));
        final Map<Object, Object> mixed = new LinkedHashMap<>(map);
        mixed.put(3L, "int key");
        mixed.put(null, "null key");
        mixed.put(Values.Tuple.of(1L, 2L), "tuple key");
        assertEquals(mixed, roundTrip(mixed));
        assertEquals(Map.of("~", "tagged?", "v", 1L), roundTrip(Map.of("~", "tagged?", "v", 1L)));
        assertEquals(Map.of(), roundTrip(Map.of()));
    }

    @Test
    void numbersHaveTheirOwnWays() {
        state.put("step", 7L).put("loss", 0.25).metric("loss", 0.25);
        assertEquals(7, state.getLong("step"));
        assertEquals(0.25, state.getDouble("loss"));
        assertEquals(7L, state.get("step"));
        assertThrows(TesseraInvalidArgumentException.class, () -> state.getLong("loss"));
        assertThrows(TesseraNotFoundException.class, () -> state.getLong("absent"));
        assertThrows(TesseraNotFoundException.class, () -> state.getDouble("absent"));
        assertThrows(TesseraNotFoundException.class, () -> state.get("absent"));
        state.put("nan", Double.NaN);
        assertEquals(Double.NaN, state.getDouble("nan"));
    }

    @Test
    void largeValues() {
        final byte[] large = new byte[300_000];
        Arrays.fill(large, (byte) 7);
        assertArrayEquals(large, (byte[]) roundTrip(large));
    }

    @Test
    void whatIsNoValueIsRefused() {
        assertThrows(IllegalArgumentException.class, () -> state.put("v", new Object()));
        assertThrows(IllegalArgumentException.class, () -> state.put("v", List.of(new StringBuilder())));
        assertThrows(IllegalArgumentException.class, () -> state.put("v", "half \uD83D pair"));
        final List<Object> cycle = new ArrayList<>();
        cycle.add(cycle);
        assertThrows(IllegalArgumentException.class, () -> state.put("v", cycle));
        Object deep = 1L;
        for (int i = 0; i < 64; ++i) {
            deep = Collections.singletonList(deep);
        }
        assertEquals(deep, roundTrip(deep));
        final Object tooDeep = Collections.singletonList(deep);
        assertThrows(IllegalArgumentException.class, () -> state.put("v", tooDeep));
        assertThrows(TesseraInvalidArgumentException.class, () -> state.put("", 1L));
        assertThrows(NullPointerException.class, () -> state.put(null, 1L));
    }
}
