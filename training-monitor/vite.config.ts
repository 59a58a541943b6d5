import react from "@vitejs/plugin-react";
import { defineConfig } from "vite";

const api = process.env["MONITOR_URL"] ?? "http://127.0.0.1:8765";

export default defineConfig({
  plugins: [react()],
  build: {
    outDir: "../cua_rl/monitor/static",
    emptyOutDir: true,
    target: "es2022",
    assetsInlineLimit: 0, // data: addresses would need a wider content security policy
    modulePreload: { polyfill: false },
  },
  server: { proxy: { "/api": api } },
});
