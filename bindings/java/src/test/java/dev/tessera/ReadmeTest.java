package dev.tessera;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertTrue;

import java.io.StringWriter;
import java.net.URI;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.ArrayList;
import java.util.List;
import java.util.regex.Matcher;
import java.util.regex.Pattern;
import javax.tools.JavaCompiler;
import javax.tools.JavaFileObject;
import javax.tools.SimpleJavaFileObject;
import javax.tools.ToolProvider;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.api.io.TempDir;

/** The examples of the page that users see first compile and run. */
class ReadmeTest {
    private static List<String> programs() throws Exception {
        final List<String> programs = new ArrayList<>();
        final Matcher blocks = Pattern.compile("```java\n(.*?)```", Pattern.DOTALL)
                .matcher(Files.readString(Path.of("README.md")));
        while (blocks.find()) {
            programs.add(blocks.group(1));
        }
        return programs;
    }

    private static String name(String program) {
        final Matcher name = Pattern.compile("class (\\w+)").matcher(program);
        assertTrue(name.find(), program);
        return name.group(1);
    }

    /** What the compiler says of a program; "" if it compiles. */
    private static String compile(String program, Path classes) {
        final JavaCompiler compiler = ToolProvider.getSystemJavaCompiler();
        final JavaFileObject source = new SimpleJavaFileObject(
                URI.create("string:///" + name(program) + ".java"), JavaFileObject.Kind.SOURCE) {
            @Override
            public CharSequence getCharContent(boolean ignoreEncodingErrors) {
                return program;
            }
        };
        final StringWriter messages = new StringWriter();
        final boolean well = compiler.getTask(messages, null, null, List.of("-d", classes.toString(), "-classpath",
                System.getProperty("java.class.path"), "-proc:none"), null, List.of(source)).call();
        assertEquals(well, messages.toString().isEmpty(), messages.toString());
        return messages.toString();
    }

    @Test
    void itsProgramsRun(@TempDir Path directory) throws Exception {
        final List<String> programs = programs();
        assertEquals(8, programs.size());
        for (String program : programs) {
            assertEquals("", compile(program, directory));
            final List<String> command = Jvm.command(name(program));
            final int classPath = command.indexOf("-cp") + 1;
            command.set(classPath, command.get(classPath) + ":" + directory);
            final List<String> inDirectory = new ArrayList<>(List.of("bash", "-c", "cd \"$0\" && exec \"$@\"",
                    directory.toString()));
            inDirectory.addAll(command);
            Jvm.run(0, inDirectory);
        }
        assertTrue(Files.isDirectory(directory.resolve("runs/train")), "the second one saves");
    }

    /** What is in an HDFS is as far as this goes; StorageTest saves and loads by Hadoop's local file system. */
    @Test
    void thePageOnStoragesCompiles(@TempDir Path directory) throws Exception {
        final Matcher block = Pattern.compile("```java\n(.*?)```", Pattern.DOTALL)
                .matcher(Files.readString(Path.of("../../docs/STORAGE.md")));
        assertTrue(block.find());
        assertEquals("", compile("import dev.tessera.*;\nimport dev.tessera.hadoop.HadoopStorage;\nimport java.net.URI;\n"
                + "import java.nio.file.Path;\nimport org.apache.hadoop.conf.Configuration;\n"
                + "import org.apache.hadoop.fs.FileSystem;\nabstract class OnStorages {\n  void run(Comm comm) throws Exception"
                + " {\n" + block.group(1) + "  }\n}\n", directory));
        assertTrue(!block.find(), "one example");
    }

    @Test
    void anArrayIsNoParameterAndTheCompilerSaysWhatIs(@TempDir Path directory) throws Exception {
        final String program = "class Arrays { dev.tessera.Params p = dev.tessera.Params.of(\"w\", %s, 2, 3); }";
        final String said = compile(String.format(program, "new float[6]"), directory);
        assertTrue(said.contains("float[] cannot be converted to FloatBuffer"), said);
        assertEquals("", compile("class Copies { dev.tessera.Params p = dev.tessera.Params.of(\"w\","
                + " dev.tessera.Tensor.copyOf(new float[6], 2, 3)); }", directory));
    }
}
