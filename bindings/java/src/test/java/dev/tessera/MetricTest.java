package dev.tessera;

import static org.junit.jupiter.api.Assertions.assertArrayEquals;
import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import java.nio.file.Path;
import java.util.List;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.api.function.Executable;
import org.junit.jupiter.api.io.TempDir;

class MetricTest {
    private static final float[] SCORES = {0.1f, 0.4f, 0.35f, 0.8f};
    private static final long[] LABELS = {0, 0, 1, 1};

    @TempDir
    Path root;

    private static Tensor labels(long... values) {
        return Tensor.copyOf(values);
    }

    @Test
    void aCurveHasArrays() {
        try (Metric roc = Metric.of(Metric.Kind.ROC_CURVE).build()) {
            roc.update(Tensor.copyOf(SCORES), labels(LABELS));
            assertTrue(Double.isNaN(roc.compute()));
            assertArrayEquals(new double[] {0, 0, 0.5, 0.5, 1}, roc.array("fpr"));
            assertArrayEquals(new double[] {0, 0.5, 0.5, 1, 1}, roc.array("tpr"));
            assertEquals(Double.POSITIVE_INFINITY, roc.array("thresholds")[0]);
            assertThrows(TesseraNotFoundException.class, () -> roc.array("matrix"));
            final String wrong = assertThrows(IllegalArgumentException.class, () -> roc.counts("tpr")).getMessage();
            assertEquals("the array \"tpr\" has numbers; call array(\"tpr\")", wrong);
            assertEquals(Metric.Kind.ROC_CURVE, roc.kind());
            assertEquals("Metric(ROC_CURVE)", roc.toString());
            for (Executable call : List.<Executable>of(() -> roc.update(null, labels(LABELS)), () -> roc.compute(null),
                    () -> roc.gather(null), () -> roc.merge(null))) {
                final String name = assertThrows(NullPointerException.class, call).getMessage();
                assertTrue(List.of("predictions", "comm", "other").contains(name), name);
            }
            roc.reset();
            assertThrows(TesseraNotFoundException.class, () -> roc.array("fpr"));
        }
    }

    @Test
    void optionsAndCounts() {
        try (Metric matrix = Metric.of(Metric.Kind.CONFUSION_MATRIX).classes(3).build();
                Metric part = Metric.of(Metric.Kind.CONFUSION_MATRIX).classes(3)
                        .normalize(Metric.Normalize.NONE).build();
                Metric recall = Metric.of(Metric.Kind.RECALL).task(Metric.Task.MULTICLASS).classes(3)
                        .average(Metric.Average.NONE).zeroDivision(1).build()) {
            matrix.update(labels(0, 2, 2), labels(0, 2, 1));
            part.update(labels(1), labels(0));
            matrix.merge(part);
            matrix.compute();
            assertArrayEquals(new long[] {1, 1, 0, 0, 0, 1, 0, 0, 1}, matrix.counts("matrix"));
            recall.update(labels(0, 1), labels(0, 0), Tensor.copyOf(new double[] {1, 3}), null);
            recall.compute();
            assertArrayEquals(new double[] {0.25, 1, 1}, recall.array("values"));
            assertThrows(TesseraInvalidArgumentException.class, () -> matrix.merge(matrix));
            assertThrows(TesseraInvalidArgumentException.class, () -> matrix.merge(recall));
        }
    }

    @Test
    void ranksHaveTheValueOfOneAndPaddingIsLeftOut() throws Exception {
        Ranks.run(3, comm -> {
            try (Sampler sampler = Sampler.of(comm, 4).build(); Metric metric = Metric.of(Metric.Kind.AUROC).build()) {
                assertEquals(0, sampler.valid().numel());
                while (sampler.epoch() == 0) {
                    final long[] batch = sampler.batch(1);
                    final float[] scores = new float[batch.length];
                    final long[] targets = new long[batch.length];
                    for (int i = 0; i < batch.length; ++i) {
                        scores[i] = SCORES[(int) batch[i]];
                        targets[i] = LABELS[(int) batch[i]];
                    }
                    metric.update(Tensor.copyOf(scores), labels(targets), null, sampler.valid());
                }
                assertEquals(0.75, metric.compute(comm));
                metric.gather(comm);
                assertEquals(0.75, metric.compute(comm));
                try (Saver saver = Saver.at(comm, root).open();
                        State state = new State().with("auroc", metric, comm)) {
                    saver.save(1, state);
                }
            }
        });
        Ranks.run(2, comm -> {
            try (Metric metric = Metric.of(Metric.Kind.AUROC).build();
                    State state = new State().with("auroc", metric, comm);
                    Checkpoint checkpoint = Checkpoint.open(root)) {
                checkpoint.load(state);
                assertEquals(0.75, metric.compute(comm));
            }
        });
    }

    @Test
    void badInputIsRefusedAndNamed() throws Exception {
        assertThrows(TesseraInvalidArgumentException.class, () -> Metric.of(Metric.Kind.AUROC).beta(2).build());
        assertTrue(assertThrows(TesseraInvalidArgumentException.class,
                () -> Metric.of(Metric.Kind.CONFUSION_MATRIX).classes(100_000).build()).getMessage().contains("limit"));
        Ranks.run(2, comm -> {
            try (Metric metric = Metric.of(Metric.Kind.AUROC).build()) {
                metric.update(Tensor.copyOf(SCORES), labels(LABELS));
                if (comm.rank() == 1) {
                    assertThrows(TesseraInvalidArgumentException.class,
                            () -> metric.update(Tensor.copyOf(SCORES), labels(0, 1, 2, 0)));
                    assertThrows(TesseraInvalidArgumentException.class,
                            () -> metric.update(Tensor.copyOf(SCORES), labels(0, 1)));
                    assertThrows(TesseraInvalidArgumentException.class,
                            () -> metric.update(Tensor.copyOf(new float[] {Float.NaN}), labels(0)));
                }
                final TesseraException error =
                        assertThrows(TesseraInvalidArgumentException.class, () -> metric.compute(comm));
                assertTrue(error.getMessage().contains("rank 1: predictions[0] is nan"), error.getMessage());
                assertEquals(0.75, metric.compute(comm));
                assertThrows(TesseraInvalidArgumentException.class, () -> metric.update(labels(0), labels(7)));
                try (Metric other = Metric.of(Metric.Kind.AUROC).build()) {
                    assertThrows(TesseraInvalidStateException.class, () -> other.merge(metric));
                }
            }
        });
    }
}
