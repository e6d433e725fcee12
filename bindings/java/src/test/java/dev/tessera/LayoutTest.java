package dev.tessera;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import java.util.List;
import org.junit.jupiter.api.Test;

class LayoutTest {
    private static Box box(long[] offsets, long[] sizes) {
        return new Box(offsets, sizes);
    }

    @Test
    void shardsAreCutAsTorchCutsThem() {
        try (Layout layout = Layout.of(new long[] {5, 3}, new int[] {4}, Placement.shard(0))) {
            assertEquals(List.of(box(new long[] {0, 0}, new long[] {2, 3})), layout.boxes(0));
            assertEquals(List.of(box(new long[] {4, 0}, new long[] {1, 3})), layout.boxes(2));
            assertEquals(List.of(), layout.boxes(3));
            assertThrows(TesseraInvalidArgumentException.class, () -> layout.boxes(4));
        }
    }

    @Test
    void placementsOnAMesh() {
        try (Layout layout =
                Layout.of(new long[] {4, 6}, new int[] {2, 2}, Placement.replicate(), Placement.shard(1))) {
            assertEquals(layout.boxes(0), layout.boxes(2));
            assertEquals(List.of(box(new long[] {0, 3}, new long[] {4, 3})), layout.boxes(3));
        }
        assertEquals("[R, S(1)]", List.of(Placement.replicate(), Placement.shard(1)).toString());
        assertEquals(Placement.shard(1), Placement.shard(1));
    }

    @Test
    void explicitBoxes() {
        final Box top = box(new long[] {0, 0}, new long[] {1, 4});
        final Box bottom = box(new long[] {1, 0}, new long[] {2, 4});
        try (Layout layout = Layout.ofBoxes(new long[] {3, 4}, List.of(List.of(bottom), List.of(top, bottom)))) {
            assertEquals(List.of(bottom), layout.boxes(0));
            assertEquals(List.of(top, bottom), layout.boxes(1));
        }
        try (Layout scalar = Layout.of(new long[0], new int[] {2}, Placement.replicate())) {
            assertEquals(List.of(box(new long[0], new long[0])), scalar.boxes(1));
        }
    }

    @Test
    void ranksGatherWhatEachHolds() throws Exception {
        final Box top = box(new long[] {0, 0}, new long[] {1, 4});
        final Box bottom = box(new long[] {1, 0}, new long[] {2, 4});
        final List<List<Box>> held = List.of(List.of(bottom), List.of(), List.of(top, bottom));
        Ranks.run(3, comm -> {
            try (Layout layout = Layout.gather(comm, new long[] {3, 4}, held.get(comm.rank()))) {
                for (int rank = 0; rank < 3; ++rank) {
                    assertEquals(held.get(rank), layout.boxes(rank));
                }
            }
            final Box across = box(new long[] {0, 0}, new long[] {2, 4});
            final TesseraException overlap = assertThrows(TesseraInvalidArgumentException.class,
                    () -> Layout.gather(comm, new long[] {3, 4}, List.of(comm.rank() == 1 ? across : top)));
            assertTrue(overlap.getMessage().contains("[0:2, 0:4] of rank 1"), overlap.getMessage());
            assertThrows(TesseraMismatchException.class,
                    () -> Layout.gather(comm, new long[1 + comm.rank()], List.of()));
            assertThrows(IllegalArgumentException.class, () -> Layout.gather(comm, new long[9], List.of()));
            assertThrows(IllegalArgumentException.class, () -> Layout.gather(comm, new long[] {3}, List.of(top)));
        });
    }

    @Test
    void badLayoutsAreRefused() {
        final long[] shape = {4};
        assertThrows(IllegalArgumentException.class, () -> Layout.of(shape, new int[] {2, 2}, Placement.shard(0)));
        assertThrows(TesseraInvalidArgumentException.class, () -> Layout.of(shape, new int[] {2}, Placement.shard(1)));
        assertThrows(NullPointerException.class, () -> Layout.of(shape, new int[] {1}, (Placement) null));
        assertThrows(IllegalArgumentException.class, () -> Layout.ofBoxes(new long[9], List.of()));
        assertThrows(IllegalArgumentException.class,
                () -> Layout.ofBoxes(shape, List.of(List.of(box(new long[] {0, 0}, new long[] {1, 1})))));
        final Box outside = box(new long[] {3}, new long[] {2});
        assertThrows(TesseraInvalidArgumentException.class, () -> Layout.ofBoxes(shape, List.of(List.of(outside))));
        final Layout closed = Layout.of(shape, new int[] {1}, Placement.replicate());
        closed.close();
        assertTrue(assertThrows(IllegalStateException.class, () -> closed.boxes(0)).getMessage().contains("closed"));
    }
}
