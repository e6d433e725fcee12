package dev.tessera;

import static org.junit.jupiter.api.Assertions.assertArrayEquals;
import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertTrue;

import java.util.Arrays;
import java.util.stream.LongStream;
import org.junit.jupiter.api.Test;

class VersionTest {
    @Test
    void tellsLibraryAndBinding() {
        assertEquals(Version.library(), Version.binding());
        assertEquals(System.getProperty("tessera.version"), Version.binding(), "the POM's");
        assertEquals(Native.headerAbiVersion(), Version.abi());
        assertTrue(Version.libraryPath().endsWith("libtessera.so.0.1") || Version.libraryPath().contains("libtessera.so"),
                Version.libraryPath());
    }

    @Test
    void numbersAreThoseOfTheHeaders() {
        final long[] java = LongStream.of(
                Arrays.stream(DType.values()).mapToLong(DType::number).toArray()).toArray();
        final long[] header = Native.headerNumbers();
        int at = 0;
        for (long number : java) {
            assertEquals(header[at++], number, "dtype " + at);
        }
        for (ReduceOp op : ReduceOp.values()) {
            assertEquals(header[at++], op.number(), op.toString());
        }
        assertEquals(header[at++], Device.cpu().type());
        assertEquals(header[at++], Device.cuda(0).type());
        for (Log.Level level : Log.Level.values()) {
            assertEquals(header[at++], level.ordinal() + 1, level.toString());
        }
        assertEquals(header[at++], Placement.replicate().kind());
        assertEquals(header[at++], Placement.shard(0).kind());
        for (TesseraException.NativeDomain domain : TesseraException.NativeDomain.values()) {
            assertEquals(header[at++], domain.ordinal(), domain.toString());
        }
        for (Pipeline.Schedule schedule : Pipeline.Schedule.values()) {
            assertEquals(header[at++], schedule.ordinal(), schedule.toString());
        }
        for (StageRelay.Kind kind : StageRelay.Kind.values()) {
            assertEquals(header[at++], kind.ordinal() + 1, kind.toString());
        }
        assertEquals(header[at++], 8, "dimensions");
        assertEquals(header.length, at);
    }

    @Test
    void errorCodesAreTheLibrarys() {
        for (ErrorCode code : ErrorCode.values()) {
            assertEquals(Native.text(Native.statusName(code.number())), code.name());
        }
        assertEquals("UNKNOWN", Native.text(Native.statusName(ErrorCode.values().length)));
        assertEquals("OK", Native.text(Native.statusName(0)));
    }

    @Test
    void aThrownErrorIsNotLeftBehind() {
        org.junit.jupiter.api.Assertions.assertThrows(TesseraException.class, () -> Store.open("nonsense"));
        assertEquals(0, Native.lastErrorCode(), "the exception holds it");
    }

    @Test
    void textSurvivesTheWayThere() {
        final String text = "Grüße, 東京, \uD83D\uDE00";
        final TesseraException error = org.junit.jupiter.api.Assertions.assertThrows(
                TesseraException.class, () -> Store.open("nonsense-" + text));
        assertTrue(error.getMessage().contains(text), error.getMessage());
        assertArrayEquals(Native.utf8(text, "text"), text.getBytes(java.nio.charset.StandardCharsets.UTF_8));
    }
}
