package dev.tessera;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertTrue;

import java.util.List;
import java.util.concurrent.CopyOnWriteArrayList;
import org.junit.jupiter.api.AfterEach;
import org.junit.jupiter.api.Test;

class LogTest {
    private final List<String> lines = new CopyOnWriteArrayList<>();

    @AfterEach
    void restore() {
        Log.setHandler(null);
        Log.setLevel(Log.Level.WARNING);
    }

    /** Makes the store's own thread log a warning: a connection of another epoch is refused. */
    private static void provokeAWarning() {
        final String token = Ranks.newToken();
        try (StoreServer server = StoreServer.serve("127.0.0.1", 0, new StoreOptions().token(token).epoch(1))) {
            Store.open("tcp://127.0.0.1:" + server.port(),
                    new StoreOptions().token(token).epoch(2).timeout(Ranks.DEADLINE)).close();
        } catch (TesseraException refused) {
            return;
        }
        throw new AssertionError("the store took another epoch");
    }

    @Test
    void linesOfTheLibrarysThreadsReachTheHandler() throws Exception {
        Log.setHandler((level, line) -> lines.add(level + " " + line));
        provokeAWarning();
        Ranks.eventually("a warning", () -> lines.stream().anyMatch(l -> l.startsWith("WARNING") && l.contains("epoch")));
    }

    @Test
    void levelsDropLines() {
        Log.setHandler((level, line) -> lines.add(line));
        Log.setLevel(Log.Level.OFF);
        provokeAWarning();
        assertEquals(List.of(), lines);
    }

    @Test
    void aHandlerThatThrowsHarmsNobody() throws Exception {
        Log.setHandler((level, line) -> {
            lines.add(line);
            throw new IllegalStateException("thrown by the test's handler");
        });
        java.util.logging.Logger.getLogger("dev.tessera").setLevel(java.util.logging.Level.OFF);
        try {
            provokeAWarning();
            Ranks.eventually("a line", () -> !lines.isEmpty());
        } finally {
            java.util.logging.Logger.getLogger("dev.tessera").setLevel(null);
        }
        assertTrue(lines.get(0).contains("epoch"), lines.toString());
    }

    @Test
    void aHandlerMayTakeItselfAway() throws Exception {
        Log.setHandler((level, line) -> {
            Log.setHandler(null);
            System.gc();
            lines.add(line);
        });
        provokeAWarning();
        Ranks.eventually("a line", () -> !lines.isEmpty());
        provokeAWarning(); // to standard error
        assertEquals(1, lines.size());
    }
}
