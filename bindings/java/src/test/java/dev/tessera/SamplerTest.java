package dev.tessera;

import static org.junit.jupiter.api.Assertions.assertArrayEquals;
import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertThrows;

import java.util.Set;
import java.util.concurrent.ConcurrentHashMap;
import org.junit.jupiter.api.Test;

class SamplerTest {
    @Test
    void anEpochIsSharedWithoutOverlap() throws Exception {
        final Set<Long> seen = ConcurrentHashMap.newKeySet();
        Ranks.run(3, comm -> {
            try (Sampler data = Sampler.of(comm, 12).seed(7).build()) {
                int taken = 0;
                while (data.epoch() == 0 && taken < 4) {
                    for (long index : data.batch(2)) {
                        assertEquals(true, seen.add(index), "sample " + index + " twice");
                        ++taken;
                    }
                }
                assertEquals(4, taken);
            }
        });
        assertEquals(12, seen.size());
    }

    @Test
    void ordersAreReproducible() throws Exception {
        Ranks.run(1, comm -> {
            try (Sampler a = Sampler.of(comm, 100).seed(1).build(); Sampler b = Sampler.of(comm, 100).seed(1).build();
                    Sampler plain = Sampler.of(comm, 5).shuffle(false).dropLast(true).build()) {
                assertArrayEquals(a.batch(10), b.batch(10));
                assertEquals(10, a.consumed());
                a.setEpoch(3);
                assertEquals(3, a.epoch());
                assertEquals(0, a.consumed());
                assertArrayEquals(new long[] {0, 1, 2, 3}, plain.batch(4));
                assertArrayEquals(new long[] {4}, plain.batch(4), "a batch never spans two epochs");
                assertArrayEquals(new long[] {0}, plain.batch(1));
                assertEquals(1, plain.epoch());
                assertThrows(IllegalArgumentException.class, () -> plain.batch(0));
                assertThrows(TesseraInvalidArgumentException.class, () -> plain.setEpoch(-1));
            }
            assertThrows(TesseraInvalidArgumentException.class, () -> Sampler.of(comm, 0).build());
        });
    }
}
